"""Decoding methods side by side on the same prompts: speed, acceptance, and whether they say the same."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.api import LongSpec
from longspec.errors import UserError

# A few prompts of different kinds, for when none are given.
BUILTIN = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "Rewrite this sentence in the past tense, then in the future tense: The cat chases the mouse.",
    "List the planets of the solar system from the sun outwards, with one fact about each.",
    "Summarise: The committee met on Monday. It decided to repair the bridge before winter, to ask the "
    "county for money, and to close the road for two weeks in October. The mayor will tell the shops.",
)


@dataclass(frozen=True)
class MethodFigures:
    """One method over all prompts. Ratios are against vanilla in the same run."""

    method: str
    tokens: int
    seconds: float
    """Of decoding alone, prefill not counted: the median over repeats."""
    speedup: float
    spread: tuple[float, float]
    """The least and the greatest speedup of a repeat."""
    tau: float
    different: int
    """Prompts whose answer was not vanilla's."""


def read_prompts(path: Path) -> list[str]:
    """Prompts of a JSONL file: each line has a `prompt`, or `turns`, of which the first is taken."""
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values: Any = json.loads(line)
            prompts.append(str(values["prompt"] if "prompt" in values else values["turns"][0]))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(f"{path}, line {number}: no 'prompt' and no 'turns' to take one from") from error
    if not prompts:
        raise UserError(f"{path} has no prompts")
    return prompts


def compare_methods(
    model: LongSpec,
    prompts: Sequence[str],
    methods: Sequence[str],
    max_new_tokens: int,
    repeats: int,
    temperature: float,
    on_done: Callable[[int], None] = lambda number: None,
) -> list[MethodFigures]:
    """Run every method on every prompt `repeats` times, the methods taking turns; vanilla is always first.

    Whole generations, until eos or `max_new_tokens`, one prompt at a time, after one that is not counted.
    """
    names = ["vanilla", *(name for name in methods if name != "vanilla")]
    for name in names:
        model.generate(prompts[0], method=name, max_new_tokens=8, temperature=temperature, seed=0)
    seconds: dict[str, list[float]] = {name: [0.0] * repeats for name in names}
    answers: dict[str, list[list[int]]] = {name: [] for name in names}
    rounds, kept = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            for name in names:
                model.reset()
                result = model.generate(
                    prompt, method=name, max_new_tokens=max_new_tokens, temperature=temperature, seed=index
                )
                seconds[name][repeat] += result.seconds - result.prefill_seconds
                if repeat == 0:
                    answers[name].append(result.token_ids)
                    rounds[name] += result.rounds
                    kept[name] += result.tokens - 1
                on_done(1)
    return [_figures(name, seconds, answers, rounds[name], kept[name]) for name in names]


def _figures(
    name: str, seconds: dict[str, list[float]], answers: dict[str, list[list[int]]], rounds: int, kept: int
) -> MethodFigures:
    ratios = [base / own for base, own in zip(seconds["vanilla"], seconds[name], strict=True)]
    pairs = zip(answers["vanilla"], answers[name], strict=True)
    return MethodFigures(
        method=name,
        tokens=sum(map(len, answers[name])),
        seconds=statistics.median(seconds[name]),
        speedup=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
        tau=kept / rounds if rounds else 0.0,
        different=sum(one != other for one, other in pairs),
    )
