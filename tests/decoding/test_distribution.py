"""Sampling keeps the target's distribution, by either criterion; a wrong rule is caught."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from longspec.attention.reference import ReferenceAttention
from longspec.decoding import drafting, rejection
from longspec.decoding.choose import SamplingRows, filtered
from longspec.decoding.methods import Lookup, MagicDec, Method, Seq, Tree
from longspec.decoding.sampling import Sampling
from longspec.decoding.tree import TokenTree
from longspec.engine.engine import Engine
from longspec.engine.fill import Segments, finish_prompts
from longspec.engine.sequence import Sequence
from tests.decoding.scripted import logits_of, pass_over, tiny_draft, tiny_engine, tiny_target

V, PLACES, SAMPLES, ROWS = 7, 3, 10_000, 2_000
PROMPT = [3, 1, 4, 1, 5]
UNLIKELY = 1e-4
SAMPLING = Sampling(temperature=0.8, top_p=0.97)


def engine_of(max_rows: int) -> Engine:
    target = tiny_target(seed=5, vocab_size=V)
    target.attention = ReferenceAttention()  # takes thousands of rows at once
    draft = tiny_draft(
        target, std=0.5, window=4, max_lag=4, cross_layers=(-1,), use_feature=False, lag_gate=False
    )
    return tiny_engine(target, draft, max_length=16, max_rows=max_rows, num_pages=8 * max_rows, page_size=4)


def samples(asked: Method, draws: bool = True, count: int = SAMPLES, batch: int = ROWS) -> Tensor:
    """Answers of PLACES tokens each, to one prompt, under as many seeds: by the engine's rounds, but with the
    prompts of all rows computed in one pass."""
    engine, found = engine_of(batch), []
    device, models = engine.device, engine.models
    method = engine.loop.fit(asked, draws)
    pages = [[*range(1 + 8 * row, 9 + 8 * row)] for row in range(batch)]
    work = Segments.empty(batch, device._fill_tables)
    for part, values in ((work.slots, range(batch)), (work.goals, range(batch)), (work.counts, [5] * batch)):
        part.copy_(torch.tensor([*values]))
    with torch.inference_mode():
        for first in range(0, count, batch):
            seeds, limits = range(first, first + batch), [len(PROMPT) + PLACES] * batch
            device.admit(
                range(batch),
                [PROMPT] * batch,
                pages,
                limits,
                seeds,
                [SAMPLING] * batch,
                [frozenset()] * batch,
            )
            tables, lengths = device._fill_tables[:batch], torch.zeros(batch, dtype=torch.int64)
            tokens = torch.tensor([PROMPT]).expand(batch, -1)
            hidden = pass_over(models.target, models.pages, tables, lengths, tokens)
            finish_prompts(models, device.slots, work, hidden[:, -1], True)
            while bool(device.slots.running.any()):
                device.round(method, batch, [True] * batch, True)
            found.append(device.slots.text[:batch, len(PROMPT) : len(PROMPT) + PLACES].clone())
    return torch.cat(found)


@cache
def exact() -> Tensor:
    """The target's probability of each answer, [V, V, V]."""
    target = tiny_target(seed=5, vocab_size=V)
    table = torch.zeros(V, V, V, dtype=torch.float64)
    with torch.inference_mode():
        for answer in itertools.product(range(V), repeat=PLACES):
            logits = logits_of(target, [*PROMPT, *answer[:-1]])[len(PROMPT) - 1 :]
            rows = SamplingRows.of([SAMPLING] * PLACES, V, torch.device("cpu"))
            p = filtered(logits, rows).double().softmax(-1)
            table[answer] = p[range(PLACES), answer].prod()
    return table


def p_values(answers: Tensor) -> list[float]:
    """Chi-square of each place's tokens, and of whole answers."""
    truth = exact()
    values = []
    codes = (answers * torch.tensor([V * V, V, 1])).sum(1)
    for observed, expected in (
        *(
            (answers[:, i].bincount(minlength=V), truth.sum([j for j in range(3) if j != i]))
            for i in range(3)
        ),
        (codes.bincount(minlength=V**3), truth.flatten()),
    ):
        wanted = expected * len(answers)
        common = wanted >= 5
        counts = torch.cat((observed[common], observed[~common].sum()[None])).double()
        wanted = torch.cat((wanted[common], wanted[~common].sum()[None]))
        keep = wanted > 0
        assert counts[~keep].sum() == 0, "something impossible was said"
        values.append(float(stats.chisquare(counts[keep].numpy(), wanted[keep].numpy()).pvalue))
    return values


METHODS: dict[str, Method] = {
    "chain": Seq(2),
    "tree": Tree((2, 4)),
    "wider than the vocabulary": Tree((12, 12)),
    "magicdec": MagicDec(2, sinks=1, window=2),
    "lookup": Lookup(2, max_ngram=1),
}


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("name", METHODS)
def test_the_targets_distribution_is_kept(name: str, acceptance: str) -> None:
    answers = samples(METHODS[name], acceptance == "rejection")
    assert min(p_values(answers)) > UNLIKELY


@pytest.mark.full
def test_a_chain_that_doubt_ends_keeps_the_distribution() -> None:
    """One row at a time, for rows of a batch take each other along."""
    method = Seq(2, min_confidence=0.4)
    assert min(p_values(samples(method, count=3_000, batch=1))) > UNLIKELY


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_a_wrong_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the bonus from p instead of from what p has become is the classic mistake."""
    monkeypatch.setattr(rejection, "residual", lambda p, q, token: p)
    answers = samples(METHODS[name])
    assert min(p_values(answers)) < UNLIKELY


def outcome(p: Tensor, q: Tensor | None, drawn: tuple[int, ...]) -> Tensor:
    """The distribution of the emitted token, given which children were drawn, by the module's own steps."""
    emitted = torch.zeros(p.shape[1], dtype=torch.float64)
    reach = 1.0
    for child in drawn:
        token = torch.tensor([child])
        if not bool(rejection.proposed(q, token)):
            continue
        chance = float(p[0, child]) if q is None else min(1.0, float(p[0, child] / q[0, child]))
        for luck in (chance - 1e-9, chance + 1e-9):
            if 0 < luck < 1:
                assert bool(rejection.accepts(p, q, token, torch.tensor([luck], dtype=torch.float64))) == (
                    luck < chance
                )
        emitted[child] += reach * chance
        reach *= 1 - chance
        p, q = rejection.residual(p, q, token), None if q is None else rejection.without(q, token)
    return emitted + reach * p[0]


@pytest.mark.parametrize("num_children", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_every_outcome_of_a_toy_tree_adds_up_to_the_target(num_children: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(1, 4, generator=generator, dtype=torch.float64).pow(3)
    q = torch.rand(1, 4, generator=generator, dtype=torch.float64).pow(2)
    if seed % 2:
        p[0, seed % 4] = 0
    if seed % 3 == 0:
        q[0, (seed + 1) % 4] = 0
    p, q = p / p.sum(), q / q.sum()
    total = torch.zeros(4, dtype=torch.float64)
    for drawn in itertools.permutations(range(4), num_children):
        chance, left = 1.0, q
        for child in drawn:
            chance *= float(left[0, child])
            left = rejection.without(left, torch.tensor([child])) if float(left[0, child]) else left
        if chance:
            total += chance * outcome(p, q, drawn)
        elif num_children == 4 and int((q > 0).sum()) == 3 and float(q[0, drawn[-1]]) == 0:
            # q ran out before the children did: the last one was never drawn
            prefix = 1.0
            left = q
            for child in drawn[:-1]:
                prefix *= float(left[0, child])
                left = rejection.without(left, torch.tensor([child]))
            total += prefix * outcome(p, q, drawn[:-1])
    torch.testing.assert_close(total, p[0], atol=1e-12, rtol=0)
    for certain in itertools.permutations(range(4), num_children):
        torch.testing.assert_close(outcome(p, None, certain), p[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize(("shape", "max_nodes"), [((4, 2), None), ((4, 8), 3)])
def test_a_drawn_tree_is_no_larger_than_it_says(
    shape: tuple[int, ...], max_nodes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is just so much room behind the text; and none of what was drawn may be pruned."""
    target = tiny_target(vocab_size=40)
    engine = tiny_engine(target, tiny_draft(target))
    sizes, propose = [], drafting.propose

    def noting(*args: Any) -> TokenTree:
        tree = propose(*args)
        sizes.append(tree.num_nodes)
        return tree

    monkeypatch.setattr(drafting, "propose", noting)
    tree = Tree(shape, max_nodes)
    engine.run([Sequence([1, 2, 3], 9, Sampling(0.8), method=tree, acceptance="rejection")])
    assert set(sizes) == {engine.loop.fit(tree, draws=True).num_nodes}
    assert sizes[0] > sum(shape[:1])
