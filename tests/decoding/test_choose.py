"""`choose` samples what it should, and its noise is noise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longspec.decoding.choose import SamplingRows, choose, filtered, gumbel, hash_bits
from longspec.decoding.sampling import Sampling
from longspec.errors import UserError

UNLIKELY = 1e-4  # a correct sampler fails one such test in ten thousand; the seeds here are fixed


def rows_of(sampling: Sampling, count: int, vocab_size: int) -> SamplingRows:
    return SamplingRows.of([sampling] * count, vocab_size, torch.device("cpu"))


def chosen_by(
    logits: torch.Tensor, sampling: Sampling, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """All rows by the same settings."""
    return choose(logits, rows_of(sampling, *logits.shape), seeds, positions, not sampling.greedy)


def draws(logits: torch.Tensor, sampling: Sampling, count: int, seed: int = 0) -> torch.Tensor:
    """`count` choices from the same logits [V], at `count` positions."""
    chosen = []
    chunk = max(1, 2**20 // len(logits))
    for start in range(0, count, chunk):
        positions = torch.arange(start, min(start + chunk, count))
        rows = logits.expand(len(positions), -1)
        chosen.append(chosen_by(rows, sampling, torch.full_like(positions, seed), positions))
    return torch.cat(chosen)


def p_value(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square of counts against probabilities; rare outcomes are pooled."""
    expected = probabilities.double() * observed.sum()
    common = expected >= 5
    counts = torch.cat((observed[common], observed[~common].sum()[None])).double()
    wanted = torch.cat((expected[common], expected[~common].sum()[None]))
    if wanted[-1] == 0:
        if counts[-1] > 0:
            return 0.0
        counts, wanted = counts[:-1], wanted[:-1]
    return float(stats.chisquare(counts.numpy(), (wanted / wanted.sum() * counts.sum()).numpy()).pvalue)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.9),
        Sampling(temperature=1.3, top_k=5),
        Sampling(temperature=0.9, min_p=0.1),
    ],
    ids=str,
)
def test_small_vocabulary_follows_the_softmax(sampling: Sampling) -> None:
    torch.manual_seed(1)
    logits = 2 * torch.randn(17)
    observed = draws(logits, sampling, 40_000).bincount(minlength=17)
    probabilities = filtered(logits[None], rows_of(sampling, 1, 17))[0].double().softmax(-1)
    assert p_value(observed, probabilities) > UNLIKELY
    assert p_value(observed, probabilities.roll(1)) < UNLIKELY, "the test must be able to fail"


def test_the_tail_of_a_large_vocabulary_is_sampled_as_often_as_it_should_be() -> None:
    # One token of probability one half, and the other half spread over 128k: each is rarer than the
    # resolution of 16-bit noise, and together they must win every second time.
    V = 128_000
    logits = torch.zeros(V)
    logits[0] = math.log(V - 1)
    chosen = draws(logits, Sampling(temperature=1.0), 1_000)
    buckets = torch.where(chosen == 0, 0, 1 + chosen % 10).bincount(minlength=11)
    probabilities = torch.tensor([0.5] + [0.05] * 10)
    assert p_value(buckets, probabilities) > UNLIKELY
    tail = chosen[chosen > 0]
    assert tail.unique().numel() > 0.97 * tail.numel(), "tail tokens repeat: the noise is too coarse"


def test_noise_is_gumbel_and_uncorrelated_between_neighbours() -> None:
    V = 50_000
    seeds, positions = torch.tensor([7, 7, 8, 8]), torch.tensor([100, 101, 100, 101])
    noise = gumbel(seeds, positions, torch.arange(V))
    for row in noise:
        assert stats.kstest(row.numpy(), "gumbel_r").pvalue > UNLIKELY
    limit = 5 / math.sqrt(V)
    for one in range(4):
        for two in range(one):
            assert abs(float(torch.corrcoef(noise[[one, two]])[0, 1])) < limit
        for shift in (1, 2, 64):
            pair = torch.stack((noise[one, :-shift], noise[one, shift:]))
            assert abs(float(torch.corrcoef(pair)[0, 1])) < limit
    # along positions and along seeds, for one token
    many = torch.arange(V)
    same, pair = torch.full_like(many, 3), torch.arange(2)
    for rows in (gumbel(same, many, pair), gumbel(many, same, pair)):
        assert stats.kstest(rows[:, 0].numpy(), "gumbel_r").pvalue > UNLIKELY
        assert abs(float(torch.corrcoef(torch.stack((rows[1:, 0], rows[:-1, 0])))[0, 1])) < limit


def test_hash_bits_are_pinned() -> None:
    """Seeds mean the same text for ever: these bits may never change, on any device."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, position, token in ((0, 0, 0), (1, 2, 3), (2**62 + 5, 131071, 151935)):
        key = mix(mix((seed + golden) % 2**64) ^ (position * golden % 2**64))
        expected = mix((key + token * golden) % 2**64)
        bits = int(hash_bits(*(torch.tensor([value]) for value in (seed, position, token))))
        assert bits % 2**64 == expected
    assert (
        int(hash_bits(torch.tensor([1]), torch.tensor([2]), torch.tensor([3]))) % 2**64 == 1553841246845048256
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
)
def test_filters_match_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 50, generator=generator)
    history = torch.randint(50, (2, 12), generator=generator)
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    theirs.append(TemperatureLogitsWarper(temperature))
    if top_k:
        theirs.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        theirs.append(TopPLogitsWarper(top_p))
    if min_p:
        theirs.append(MinPLogitsWarper(min_p))
    seen = torch.zeros(2, 50, dtype=torch.bool).scatter_(1, history, True)
    settings = Sampling(temperature, top_k, top_p, min_p, penalty)
    ours = filtered(logits, rows_of(settings, 2, 50), seen)
    torch.testing.assert_close(ours.softmax(-1), theirs(history, logits.clone()).softmax(-1))  # type: ignore[arg-type]


def test_rows_do_not_see_each_other() -> None:
    """Each has its own settings, greedy among sampled ones; what a row has seen counts for it alone."""
    torch.manual_seed(0)
    logits, seeds, positions = torch.randn(8, 1000), torch.arange(8) * 11, torch.arange(8) + 5
    settings = [
        *(Sampling(0.8, top_p=0.95, top_k=100), Sampling(), Sampling(1.2), Sampling(0.7, min_p=0.2)),
        *(Sampling(repetition_penalty=2.0), Sampling(0.9, repetition_penalty=1.3), Sampling(), Sampling(2.0)),
    ]
    rows = SamplingRows.of(settings, 1000, torch.device("cpu"))
    rows.seen.copy_(torch.rand(8, 1000) < 0.3)
    together = choose(logits, rows, seeds, positions, True)
    for row in range(8):
        one = slice(row, row + 1)
        alone = choose(logits[one], rows.at(torch.tensor([row])), seeds[one], positions[one], True)
        assert alone.tolist() == together[one].tolist()
    best = logits.argmax(-1)
    assert together[[1, 6]].tolist() == best[[1, 6]].tolist(), "greedy, whatever the others do"
    assert choose(logits, rows, seeds, positions, False).tolist() == best.tolist()
    # A row that gets other settings has seen nothing.
    rows.put(torch.tensor([4]), [Sampling(0.5)])
    assert not bool(rows.seen[4].any())
    assert rows.temperature.tolist() == pytest.approx([0.8, 0, 1.2, 0.7, 0.5, 0.9, 0, 2])
    assert bool((rows.without_penalty().penalty == 1).all())


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    ],
)
def test_bad_settings_are_named(values: dict[str, float], named: str) -> None:
    with pytest.raises(UserError, match=named):
        Sampling(**values)  # type: ignore[arg-type]


def test_a_models_own_settings_count_only_if_it_samples() -> None:
    config = {"do_sample": True, "top_p": 0.8, "temperature": 0.7, "top_k": 20, "max_length": 9}
    assert Sampling.from_generation_config(config) == Sampling(0.7, 20, 0.8)
    assert Sampling.from_generation_config({"do_sample": True}) == Sampling(1.0)
    assert Sampling.from_generation_config({"temperature": 0.7, "top_p": None}) == Sampling()
    # Its filters wait for a request that asks for a temperature; some write -1 for no top_k.
    assert Sampling.from_generation_config(config | {"do_sample": False}) == Sampling(0.0, 20, 0.8)
    assert Sampling.from_generation_config({"top_k": -1}) == Sampling()


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-42, 1e-300])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    logits = 50 * torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    seeds = positions = torch.arange(4)
    chosen = chosen_by(logits, Sampling(temperature, 50, 0.9, 0.1), seeds, positions)
    assert chosen.tolist() == logits.argmax(-1).tolist()


def test_whole_numbers_become_what_kernels_take() -> None:
    sampling = Sampling(1, 5, 1, 0, 2)
    assert [type(value) for value in vars(sampling).values()] == [float, int, float, float, float]
    assert sampling == Sampling(1.0, 5, 1.0, 0.0, 2.0)
