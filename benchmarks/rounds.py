"""What a chain's round costs on one CPU thread, by part, in vanilla steps: `python benchmarks/rounds.py`.

The target is the default one, the draft has random weights: what a round costs does not depend on them.
Everything takes turns, and what is counted is the thread's own time, so that other programs matter less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.shapes import fill_pages, random_draft
from longspec import LongSpec
from longspec.config import DraftConfig
from longspec.decoding.methods import VANILLA, Method, Seq
from longspec.decoding.round import forward_chain_or_tree, run_round
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree
from longspec.engine.engine import Engine
from longspec.engine.make import make_engine
from longspec.models.target import Transformer

CONTEXTS = (128, 512, 2048)
GAMMAS = (3, 4, 6)
# Name, the weights, and the vocabulary (0 is all).
VARIANTS = (
    ("fp32, whole head", "target", 0),
    ("fp32", "target", 8192),
    ("int8, whole head", "int8", 0),
    ("int8", "int8", 8192),
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
    engines = {name: _engine(target, dtype, vocab) for name, dtype, vocab in VARIANTS}
    return [line for context in CONTEXTS for line in _at(engines, context, repeats)]


def _engine(target: Transformer, draft_dtype: str, draft_vocab: int) -> Engine:
    """One row, over random KV."""
    thirds = tuple(part * target.config.num_layers // 3 - 1 for part in (1, 2, 3))
    config = DraftConfig(
        cross_layers=thirds, use_feature=True, final_norm=True, qkv_bias=False, draft_vocab=draft_vocab
    )
    drafting = random_draft(target, config, draft_dtype)
    engine = make_engine(target, *drafting, max_length=max(CONTEXTS) + 64, max_rows=1)
    fill_pages(engine.models.pages)
    return engine


def _at(engines: dict[str, Engine], context: int, repeats: int) -> list[Line]:
    times: dict[object, list[float]] = {}
    with torch.inference_mode():
        for turn in range(repeats + 1):
            found: dict[object, float] = {}
            first = next(iter(engines.values()))
            found["step"] = _timed(first, context, partial(_run, first, VANILLA))
            for name, engine in engines.items():
                for gamma in GAMMAS:
                    _take_turn(engine, context, (name, gamma), found)
            if turn > 0:  # in the first one the draft reads the text
                for key, seconds in found.items():
                    times.setdefault(key, []).append(seconds)
    step = statistics.median(times["step"])
    return [
        Line(
            context,
            name,
            gamma,
            *(statistics.median(times[part, name, gamma]) / step for part in ("propose", "verify", "whole")),
        )
        for name in engines
        for gamma in GAMMAS
    ]


def _timed(engine: Engine, context: int, work: Callable[[Slots], object]) -> float:
    """Seconds of the thread for work on a row that stands behind so many tokens."""
    device = engine.device
    device.place_rows(1, context)
    rows = device.slots.first(1)
    rows.active.fill_(True)
    started = time.thread_time()
    work(rows)
    return time.thread_time() - started


def _run(engine: Engine, method: Method, rows: Slots) -> None:
    run_round(engine.models, rows, method, False)


def _take_turn(engine: Engine, context: int, key: tuple[str, int], found: dict[object, float]) -> None:
    """A round in one piece, which also leaves the processor's cache as rounds do, then its parts."""
    models = engine.models
    method = Seq(key[1]).fit(models)
    trees: list[TokenTree] = []
    found["whole", *key] = _timed(engine, context, partial(_run, engine, method))
    found["propose", *key] = _timed(
        engine, context, lambda rows: trees.append(method.propose(models, rows, False))
    )
    found["verify", *key] = _timed(
        engine, context, lambda rows: forward_chain_or_tree(models, rows, trees[0])
    )


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
    target = LongSpec.from_pretrained(draft="none", dtype="float32", device="cpu", calibrate=False).target
    print(table(measure_rounds(target, repeats)))


if __name__ == "__main__":
    main()
