"""Replayed rounds on a GPU: the tokens of vanilla and of the CPU, one launch each, and nobody waits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from longspec.api import prepare_draft
from longspec.attention import choose_backend
from longspec.config import DraftConfig
from longspec.decoding.accept import accept_coupled
from longspec.decoding.choose import Sampling
from longspec.decoding.device import DeviceRounds, RoundStore, needs_no_host
from longspec.decoding.loop import DecodeState, Method, decode, start
from longspec.decoding.methods.make import MethodOptions, make_method
from longspec.decoding.row import Row
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.target import Transformer
from tests.decoding.scripted import tiny_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda")
LENGTHS = (17, 3, 40)
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(0.8, top_p=0.9)}
METHODS = {
    "vanilla": MethodOptions("vanilla"),
    "seq": MethodOptions("seq", gamma=4),
    "tree": MethodOptions("tree", tree_shape=(4, 8, 8), max_nodes=16),
    "copying": MethodOptions("tree", tree_shape=(4, 8, 8), max_nodes=16, num_copied=6),
    "magicdec": MethodOptions("magicdec", gamma=3, sinks=2, window=6),
    "lookup": MethodOptions("lookup", gamma=4),
}


def models(device: torch.device) -> tuple[Transformer, tuple[GlideDraft, DraftHead]]:
    """A random target and a random draft that uses everything a draft may."""
    target = tiny_target(3, vocab_size=40, num_layers=3, hidden_size=64, head_dim=32).to(device)
    target.attention = choose_backend("triton")
    config = DraftConfig(window=8, cross_layers=(0, -1), use_feature=True, lag_gate=True)
    draft = GlideDraft(target.config, config)
    draft.initialise(torch.Generator().manual_seed(2), std=0.3)
    return target, prepare_draft(draft.to(device), target)


def prepared(target: Transformer, sampling: Sampling, batch: int, max_new_tokens: int) -> DecodeState:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(40, (n,), generator=generator).tolist() for n in LENGTHS[:batch]]
    rows = [
        Row(prompt, 5 + index, max_new_tokens - 4 * index, frozenset({39}))
        for index, prompt in enumerate(prompts)
    ]
    cache = target.new_cache(batch, max(LENGTHS) + max_new_tokens + 32)
    return start(target, cache, rows, sampling)


def answers(
    target: Transformer, method: Method, sampling: Sampling, batch: int, max_new_tokens: int = 60
) -> list[list[int]]:
    state = prepared(target, sampling, batch, max_new_tokens)
    rounds = RoundStore() if needs_no_host(state, method) else None
    for _ in decode(state, method, accept_coupled, chunk=16, rounds=rounds):
        pass
    return [row.tokens for row in state.rows]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("batch", [1, 3])
def test_replayed_rounds_say_what_vanilla_says_and_what_the_cpu_says(batch: int, sampling: Sampling) -> None:
    on_cpu = tiny_target(3, vocab_size=40, num_layers=3, hidden_size=64, head_dim=32)
    expected = answers(on_cpu, make_method(METHODS["vanilla"], sampling, None)[0], sampling, batch)
    target, drafting = models(GPU)
    for name, options in METHODS.items():
        method, _ = make_method(options, sampling, drafting)
        assert (method.device_key is None) == (name == "lookup")
        assert answers(target, method, sampling, batch) == expected, name


def calls_between_launches(recorded: profile) -> list[str]:
    """What the host asked of CUDA from the first launch of a graph to the last, in order."""
    events = sorted(recorded.events() or [], key=lambda event: event.time_range.start)
    calls = [
        event.name for event in events if event.device_type.name == "CPU" and event.name.startswith("cu")
    ]
    launches = [place for place, name in enumerate(calls) if name.startswith("cudaGraphLaunch")]
    return calls[launches[0] : launches[-1] + 1] if launches else []


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", ["vanilla", "seq", "tree", "magicdec"])
def test_a_round_is_one_launch_and_waits_for_nobody(name: str, sampling: Sampling) -> None:
    num_rounds = 20
    target, drafting = models(GPU)
    method, _ = make_method(METHODS[name], sampling, drafting)
    state = prepared(target, sampling, 1, 400)
    with torch.inference_mode():
        state.cache.keys.zero_()
        state.cache.values.zero_()
        state.cache.lengths.fill_(LENGTHS[0])
        rounds = DeviceRounds(state, method).run(state)
        for _ in range(5):
            next(rounds)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            for _ in range(num_rounds):
                next(rounds)
    calls = calls_between_launches(recorded)
    counts = {call: calls.count(call) for call in calls}
    assert sum(call.startswith("cudaGraphLaunch") for call in calls) == num_rounds, counts
    assert not [call for call in calls if "LaunchKernel" in call or "Malloc" in call], counts
    # The host may wait for the event of a round that it reads, while the next one runs; for nothing else.
    assert {call for call in calls if "Synchronize" in call} <= {"cudaEventSynchronize"}, counts
    # Each round's report is copied once, without waiting.
    copies = [call for call in calls if "Memcpy" in call]
    assert copies == ["cudaMemcpyAsync"] * (num_rounds - 1), counts


@pytest.mark.parametrize("name", ["vanilla", "copying"])
def test_kept_rounds_outlive_a_longer_text_elsewhere(name: str) -> None:
    """The target's table of rotations grows, as when `auto` measures; graphs that read the old one go on."""
    target, drafting = models(GPU)
    method, _ = make_method(METHODS[name], Sampling(), drafting)
    store, said = RoundStore(), []
    cache = target.new_cache(1, max(LENGTHS) + 92)
    for grows in (False, True):
        if grows:
            target.rope.reserve(2**20)
            torch.cuda.empty_cache()  # an old table that nobody holds is unmapped
            rubbish = [torch.full_like(target.rope.table, torch.nan) for _ in range(4)]
            del rubbish
        cache.lengths.zero_()
        state = start(target, cache, prepared(target, Sampling(), 1, 60).rows, Sampling())
        for _ in decode(state, method, accept_coupled, chunk=16, rounds=store):
            pass
        said.append(state.rows[0].tokens)
    assert said[0] == said[1]


def test_threads_capture_side_by_side() -> None:
    """Others decode and allocate while one captures, and they take turns to capture."""
    target, drafting = models(GPU)
    jobs = [(name, sampling) for name in ("vanilla", "copying", "seq") for sampling in SAMPLINGS.values()]

    def answer(job: tuple[str, Sampling]) -> list[list[int]]:
        method, _ = make_method(METHODS[job[0]], job[1], drafting)
        return answers(target, method, job[1], 3)

    with ThreadPoolExecutor(3) as pool:
        together = [list(pool.map(answer, jobs)) for _ in range(3)]
    assert together == [[answer(job) for job in jobs]] * 3
