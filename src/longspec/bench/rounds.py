"""What a chain's round costs on one CPU thread, by part, in vanilla steps: `python -m longspec.bench.rounds`.

The target is the default one, the draft has random weights: what a round costs does not depend on them.
Everything takes turns, and what is counted is the thread's own time, so that other programs matter less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from longspec import LongSpec
from longspec.api import prepare_draft
from longspec.config import DraftConfig
from longspec.decoding.accept import accept_coupled
from longspec.decoding.choose import Sampling
from longspec.decoding.loop import DecodeState, Method, run_round, start
from longspec.decoding.methods.chain import Chain
from longspec.decoding.methods.glide import Glide
from longspec.decoding.methods.vanilla import Vanilla
from longspec.decoding.row import Row
from longspec.models.draft import GlideDraft
from longspec.models.target import Transformer

CONTEXTS = (128, 512, 2048)
GAMMAS = (3, 4, 6)
# Name, whether the tree's code drafts it, the weights, and the vocabulary (0 is all).
VARIANTS = (
    ("as a tree, fp32, whole head", True, "target", 0),
    ("as a tree, fp32", True, "target", 8192),
    ("chain, fp32", False, "target", 8192),
    ("chain, int8, whole head", False, "int8", 0),
    ("chain, int8", False, "int8", 8192),
)


@dataclass(frozen=True)
class Line:
    """One variant at one context and gamma, in vanilla steps."""

    context: int
    variant: str
    gamma: int
    propose: float
    verify: float
    """The target's pass over the nodes, its head not counted."""
    whole: float


def measure_rounds(target: Transformer, repeats: int) -> list[Line]:
    """Every variant at every context and gamma."""
    methods: dict[tuple[str, int], Method] = {}
    thirds = tuple(part * target.config.num_layers // 3 - 1 for part in (1, 2, 3))
    for name, as_tree, kind, vocab in VARIANTS:
        config = DraftConfig(
            cross_layers=thirds, use_feature=True, final_norm=True, qkv_bias=False, draft_vocab=vocab
        )
        draft = GlideDraft(target.config, config)
        draft.initialise(torch.Generator().manual_seed(0))
        drafting = prepare_draft(draft, target, kind)
        for gamma in GAMMAS:
            tree = Glide(*drafting, (1,) * gamma, None, draws=False, name="seq")
            methods[name, gamma] = tree if as_tree else Chain(*drafting, gamma, None)
    return [line for context in CONTEXTS for line in _at(target, methods, context, repeats)]


def _at(
    target: Transformer, methods: dict[tuple[str, int], Method], context: int, repeats: int
) -> list[Line]:
    generator = torch.Generator().manual_seed(0)
    cache = target.new_cache(1, context + 16)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    target.rope.reserve(cache.capacity)
    prompt = torch.randint(8192, (context,), generator=generator).tolist()
    times: dict[object, list[float]] = {}

    def timed(key: object, work: Callable[[], object]) -> None:
        cache.lengths.fill_(context)
        started = time.thread_time()
        work()
        times.setdefault(key, []).append(time.thread_time() - started)

    with torch.inference_mode():
        cache.lengths.fill_(context)
        states = {key: start(target, cache, [Row(prompt, 0, 10**6)], Sampling()) for key in methods}
        vanilla = start(target, cache, [Row(prompt, 0, 10**6)], Sampling())
        for key, method in methods.items():
            method.begin(states[key])
        for _ in range(repeats):
            timed("step", lambda: run_round(vanilla, Vanilla(), accept_coupled))
            for key, method in methods.items():
                _take_turn(states[key], method, key, timed)
    step = statistics.median(times["step"])
    return [
        Line(context, *key, *(statistics.median(times[part, key]) / step for part in _PARTS))
        for key in methods
    ]


_PARTS = ("propose", "verify", "whole")


def _take_turn(
    state: DecodeState,
    method: Method,
    key: tuple[str, int],
    timed: Callable[[object, Callable[[], object]], None],
) -> None:
    """A round in one piece, which also leaves the processor's cache as rounds do, then its parts."""
    timed(("whole", key), lambda: run_round(state, method, accept_coupled))
    timed(("propose", key), lambda: method.propose(state))
    tree = method.propose(state)
    timed(("verify", key), lambda: state.target(tree.tokens, state.cache, tree.sees()))


def table(lines: list[Line]) -> str:
    """For people, as markdown: the parts at gamma 4, and whole rounds."""
    rows = [
        "| context | draft | propose 4 | verify 5 | the rest | "
        + " | ".join(f"round of {gamma}" for gamma in GAMMAS)
        + " |",
        "|---" * (5 + len(GAMMAS)) + "|",
    ]
    by_key = {(line.context, line.variant, line.gamma): line for line in lines}
    for context in CONTEXTS:
        for variant, *_ in VARIANTS:
            four = by_key[context, variant, 4]
            rest = four.whole - four.propose - four.verify
            whole = " | ".join(f"{by_key[context, variant, gamma].whole:.2f}" for gamma in GAMMAS)
            rows.append(
                f"| {context} | {variant} | {four.propose:.3f} | {four.verify:.2f} | {rest:.2f} | {whole} |"
            )
    return "\n".join(rows)


def main(repeats: int = 15) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    target = LongSpec.from_pretrained(draft="none", dtype="float32", device="cpu").engine.target
    print(table(measure_rounds(target, repeats)))


if __name__ == "__main__":
    main()
