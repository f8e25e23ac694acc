"""Captured rounds on a GPU: the words of the plain engine, one launch each, and nobody waits."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from longspec.attention import choose_backend
from longspec.decoding.methods import VANILLA, Auto, Lookup, MagicDec, Method, Seq, Tree
from longspec.decoding.sampling import Sampling
from longspec.engine.auto import Policy
from longspec.engine.costs import Costs
from longspec.engine.engine import Engine
from longspec.engine.sequence import Sequence
from tests.decoding.scripted import ask, tiny_draft, tiny_engine, tiny_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = [
    "cuda",
    pytest.param("cuda:1", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
]
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(0.8, top_p=0.9),
    "penalty": Sampling(1.1, 20, 0.9, 0.0, 1.2),
}
METHODS = {
    "vanilla": VANILLA,
    "seq": Seq(gamma=4),
    "tree": Tree(tree_shape=(4, 8, 8), max_nodes=16),
    "looking up": Tree(tree_shape=(4, 8, 8), max_nodes=16, num_lookup=6),
    "magicdec": MagicDec(gamma=3, sinks=2, window=6),
    "lookup": Lookup(gamma=4),
    "auto": Auto(),
}
PROMPTS = [[(7 * place * place + 3) % 40 for place in range(length)] for length in (17, 3, 40, 200)]


def engine_on(device: str, **sizes: int) -> Engine:
    """A random target and draft, by our kernels where there is a GPU."""
    target = tiny_target(3, vocab_size=40, num_layers=3, hidden_size=64, head_dim=32, max_length=8192).to(
        device
    )
    target.attention = choose_backend("torch" if device == "cpu" else "triton")
    engine = tiny_engine(target, tiny_draft(target), **{"max_length": 320, "num_pages": 120} | sizes)
    assert engine.models.fused == (device != "cpu")
    return engine


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("batch", [1, 3, 4])
def test_captured_rounds_say_what_the_plain_engine_says(device: str, batch: int, sampling: Sampling) -> None:
    expected = ask(engine_on("cpu"), PROMPTS[-batch:], sampling=sampling, seed=5, new=60)
    engine = engine_on(device)
    for name, options in METHODS.items():
        found = ask(engine, PROMPTS[-batch:], options, sampling, seed=5, new=60)
        assert [one.tokens for one in found] == [one.tokens for one in expected], name
    assert engine.statistics.num_captures > 0


def test_methods_samplings_and_ends_at_once() -> None:
    """With few pages, so that some are paused."""
    rng = random.Random(1)
    plain, engine = engine_on("cpu"), engine_on("cuda", num_pages=36, max_rows=6)

    def sequences() -> list[Sequence]:
        rng.seed(2)
        return [
            Sequence(
                [rng.randrange(40) for _ in range(rng.choice((1, 16, 17, 90)))], rng.randrange(1, 100),
                rng.choice([*SAMPLINGS.values()]), index, frozenset({index}), rng.choice([*METHODS.values()]),
            )
            for index in range(24)
        ]  # fmt: skip

    expected, found = sequences(), sequences()
    for one in expected:
        plain.run([one])
    engine.run(found)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
    assert engine.statistics.num_paused > 0
    assert engine.statistics.held_pages == 0


def test_requests_of_all_lengths_capture_nothing_anew() -> None:
    """200 prompts of 10 to 7,000 tokens: a capture for each method, number of rows and form, and no more."""
    rng, new = random.Random(0), 12
    engine = engine_on("cuda", max_length=7100, num_pages=2000, max_rows=4)
    used = [METHODS[name] for name in ("vanilla", "tree")]
    done = 0
    for _ in range(50):
        asked = [
            Sequence(
                [rng.randrange(40) for _ in range(rng.randrange(10, 7001))], new,
                rng.choice((Sampling(), SAMPLINGS["sampled"])), done + index, method=rng.choice(used),
            )
            for index in range(4)
        ]  # fmt: skip
        engine.run(asked)
        assert all(len(one.tokens) == new for one in asked)
        done += len(asked)
    assert done == 200
    rounds = len(used) * len(engine.device.buckets) * 2
    segments, rings = 2 * 6, len(engine.device.buckets)
    assert engine.statistics.num_captures <= rounds + segments + rings
    captured = engine.statistics.num_captures
    engine.run([Sequence([3] * 6999, new, method=used[1])])
    assert engine.statistics.num_captures == captured


def calls_between_launches(recorded: profile) -> list[str]:
    """What the host asked of CUDA from the first launch of a graph to the last, in order."""
    events = sorted(recorded.events() or [], key=lambda event: event.time_range.start)
    calls = [
        event.name for event in events if event.device_type.name == "CPU" and event.name.startswith("cu")
    ]
    launches = [place for place, name in enumerate(calls) if name.startswith("cudaGraphLaunch")]
    return calls[launches[0] : launches[-1] + 1] if launches else []


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", ["vanilla", "seq", "looking up", "magicdec", "lookup"])
def test_a_round_is_one_launch_and_waits_for_nobody(name: str, sampling: Sampling) -> None:
    num_rounds, engine = 20, engine_on("cuda")
    ask(engine, PROMPTS[:1], METHODS[name], sampling)
    asked = METHODS[name]
    assert isinstance(asked, Method)
    method = engine.loop.fit(asked)
    with engine.paused() as device:
        sampled = sampling != Sampling()
        device.slots.running[0] = True

        def run() -> None:
            device.round(method, 1, [True], sampled)

        for _ in range(5):
            run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            for _ in range(num_rounds):
                run()
        device.release([0])
    calls = calls_between_launches(recorded)
    counts = {call: calls.count(call) for call in calls}
    assert sum(call.startswith("cudaGraphLaunch") for call in calls) == num_rounds, counts
    assert not [call for call in calls if "LaunchKernel" in call], counts
    assert not [call for call in calls if "Synchronize" in call], counts
    # Each round's report is copied once, without waiting.
    assert [call for call in calls if "Memcpy" in call] == ["cudaMemcpyAsync"] * (num_rounds - 1), counts


def test_what_is_prepared_is_not_captured_later() -> None:
    engine = engine_on("cuda")
    engine.prepare(4)
    captured = engine.statistics.num_captures
    assert captured > 0
    for sampling in SAMPLINGS.values():
        ask(engine, PROMPTS[:3], METHODS["vanilla"], sampling)
    assert engine.statistics.num_captures == captured


@pytest.mark.parametrize("step", [1e-4, 1.0], ids=["pays not", "pays"])
def test_auto_captures_in_the_middle_of_an_answer_only_if_that_pays(step: float) -> None:
    """The smaller tree is better as soon as `auto` has seen that nothing drafted here is accepted."""
    engine, large, small = engine_on("cuda"), Tree((4, 8, 8), 16), Tree((2, 4), 6)
    steps = {VANILLA: 9.0, large: 1.4, small: 1.0}
    times = {method.label: {1: [(256, step * number)]} for method, number in steps.items()}
    acceptance = {"trees": {"4,8,8/16": [0.9, 0.8, 0.7], "2,4/6": [0.7, 0.4]}}
    engine.loop.policy = Policy((large, small), acceptance, Costs(times, (large, small)))
    engine.prepare(1)
    captured = engine.statistics.num_captures
    ask(engine, PROMPTS[:1], Auto(), new=100)
    assert (engine.statistics.num_captures > captured) == (step == 1.0)


def test_threads_share_an_engine() -> None:
    engine = engine_on("cuda")
    jobs = [(name, sampling) for name in METHODS for sampling in SAMPLINGS.values()]

    def answer(job: tuple[str, Sampling]) -> list[list[int]]:
        return [one.tokens for one in ask(engine, PROMPTS[:3], METHODS[job[0]], job[1])]

    with ThreadPoolExecutor(6) as pool:
        together = [list(pool.map(answer, jobs)) for _ in range(2)]
    assert together == [[answer(job) for job in jobs]] * 2
