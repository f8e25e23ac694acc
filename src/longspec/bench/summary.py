"""From rows to figures: medians of repeats with their spread, and ratios within one run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longspec.bench.folder import Row
from longspec.data.screen import loop_start

ALL = "all"
"""The kind under which all prompts of a workload are taken together."""


@dataclass(frozen=True)
class Spread:
    """The median over repeats, the least and the greatest."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Figures:
    """One method on one kind of prompt.

    A speed counts decoding alone and the prefill is given apart; the speed of batches counts both.
    """

    workload: str
    kind: str
    temperature: float
    method: str
    ran: list[str]
    """The methods that answered: the method itself, or what `auto` chose."""
    items: int
    repeats: int
    prompt_tokens: int
    """The median of the prompts' lengths."""
    tokens: int
    """Of one repeat."""
    tokens_per_second: Spread
    prefill_seconds: Spread
    """Of all prompts of a repeat."""
    decode_seconds: Spread
    speedup: dict[str, Spread]
    """The speed relative to each baseline: vanilla, and every way of hf."""
    tau: float | None
    tau_without_loops: float | None
    """tau up to where an answer begins to repeat itself, because repeated text is easy to draft."""
    acceptance: list[float]
    """The share of rounds that kept an accepted token at depth 1, 2, ..."""
    peak_memory: int
    memory_above_start: int
    """The peak less what was in use when the answer began: KV and activations."""
    compared: int
    """Answers that were compared with vanilla's, over all repeats."""
    different: int
    """Compared answers that differ from vanilla's."""
    ties: int
    """Differences whose margin lies within the rounding of the dtype."""
    largest_margin: float | None
    """The largest distance in logits between the two tokens of a difference, by a fresh pass."""

    @property
    def name(self) -> str:
        """The workload with the kind of its prompts."""
        own = self.kind in self.workload.split(":")
        return self.workload if own else f"{self.workload}/{self.kind}"


def summarise(rows: Iterable[Row]) -> list[Figures]:
    """The figures of every group that has rows, in the order in which they came; kinds, then all together."""
    rows = list(rows)
    figures: list[Figures] = []
    for workload, temperature in _distinct(rows, "workload", "temperature"):
        own = [row for row in rows if (row["workload"], row["temperature"]) == (workload, temperature)]
        kinds = [kind for (kind,) in _distinct(own, "kind")]
        for kind in [*kinds, ALL] if len(kinds) > 1 else kinds:
            group = [row for row in own if kind in (row["kind"], ALL)]
            methods = [method for (method,) in _distinct(group, "method")]
            by_method = {one: [row for row in group if row["method"] == one] for one in methods}
            figures += [_figures(kind, method, by_method) for method in methods]
    return figures


def _distinct(rows: Sequence[Row], *names: str) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def _figures(kind: str, method: str, by_method: dict[str, list[Row]]) -> Figures:
    rows = by_method[method]
    baselines = [name for name in by_method if name == "vanilla" or name.startswith("hf")]
    ratios = {name: _ratios(rows, by_method[name]) for name in baselines}
    first = [row for row in rows if row["repeat"] == min(row["repeat"] for row in rows)]
    drafted = [row for row in rows if "rounds" in row]
    margins = [row["difference"]["margin"] for row in rows if row["difference"]]
    repeats = _repeats(rows)
    return Figures(
        workload=rows[0]["workload"],
        kind=kind,
        temperature=rows[0]["temperature"],
        method=method,
        ran=sorted({row["ran"] for row in rows}),
        items=len({row["item"] for row in rows}),
        repeats=len(repeats),
        prompt_tokens=int(statistics.median(row["prompt_tokens"] for row in rows)),
        tokens=sum(row["tokens"] for row in first),
        tokens_per_second=Spread.of([_speed(one) for one in repeats]),
        prefill_seconds=Spread.of([sum(row["prefill_seconds"] for row in one) for one in repeats]),
        decode_seconds=Spread.of([sum(row["decode_seconds"] for row in one) for one in repeats]),
        speedup={name: Spread.of(found) for name, found in ratios.items() if found},
        tau=_tau(drafted),
        tau_without_loops=_tau_without_loops(drafted),
        acceptance=acceptance(drafted),
        peak_memory=max(row["peak_memory"] for row in rows),
        memory_above_start=max(row["memory_above_start"] for row in rows),
        compared=sum(row["compared"] for row in rows),
        different=sum(row["difference"] is not None for row in rows),
        ties=sum(_is_tie(row["difference"]) for row in rows if row["difference"]),
        largest_margin=max((abs(margin) for margin in margins if margin is not None), default=None),
    )


def _is_tie(difference: dict[str, Any]) -> bool:
    margin, rounding = difference["margin"], difference.get("rounding")
    return margin is not None and rounding is not None and abs(margin) <= rounding


def _repeats(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each repeat. An unfinished repeat counts only where no repeat is finished."""
    repeats = [[row for row in rows if row["repeat"] == one] for (one,) in _distinct(rows, "repeat")]
    most = max(map(len, repeats))
    return [one for one in repeats if len(one) == most]


def _speed(rows: Sequence[Row]) -> float:
    """Tokens per second of one repeat's rows: decoded ones over the time of decoding; of batches all of them
    over the time from a batch's submission to its last answer's end."""
    batches = {row["batch"]: row["batch_seconds"] for row in rows if "batch" in row}
    seconds = sum(batches.values()) if batches else sum(row["decode_seconds"] for row in rows)
    tokens = sum(row["tokens" if batches else "decoded_tokens"] for row in rows)
    return tokens / seconds if seconds else 0.0


def _ratios(rows: Sequence[Row], base: Sequence[Row]) -> list[float]:
    """Speed against the base's in each repeat, over the items that both have finished."""
    found = []
    for (repeat,) in _distinct(rows, "repeat"):
        own = {row["item"]: row for row in rows if row["repeat"] == repeat}
        other = {row["item"]: row for row in base if row["repeat"] == repeat}
        both = own.keys() & other.keys()
        slower = _speed([other[item] for item in both]) if both else 0.0
        if slower:
            found.append(_speed([own[item] for item in both]) / slower)
    return found


def _tau(rows: Sequence[Row]) -> float | None:
    rounds = sum(row["rounds"] for row in rows)
    return sum(row["decoded_tokens"] for row in rows) / rounds if rounds else None


def _tau_without_loops(rows: Sequence[Row]) -> float | None:
    """From the tokens of the first repeat and how each of them came; None where rows do not have them."""
    tokens = rounds = 0
    for row in (row for row in rows if "token_ids" in row):
        for ids, depths in zip(row["token_ids"], row["depths"], strict=True):
            start = loop_start(np.array(ids)) if ids else None
            kept = depths[1 : len(ids) if start is None else max(1, start)]
            tokens += len(kept)
            # A round ends with the target's own token, unless it was cut off.
            rounds += kept.count(0) + bool(kept and kept[-1])
    return tokens / rounds if rounds else None


def acceptance(rows: Sequence[Row]) -> list[float]:
    """The share of rounds that kept an accepted token at depth 1, 2, ..."""
    rounds = sum(row["rounds"] for row in rows)
    depth = max((len(row["accepted_by_depth"]) for row in rows), default=0)
    counts = np.zeros(depth)
    for row in rows:
        counts[: len(row["accepted_by_depth"])] += row["accepted_by_depth"]
    return (counts / rounds).tolist() if rounds else []
