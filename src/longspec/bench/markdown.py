"""The figures as markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longspec.bench.folder import Row
from longspec.bench.summary import Figures, Spread

MAIN = (
    "prompts",
    "T",
    "method",
    "tokens/s",
    "speedup",
    "tau",
    "no loops",
    "prefill s",
    "memory",
    "same as vanilla",
)


def spread(value: Spread | None, digits: int = 2) -> str:
    """The median, and the least and the greatest where they differ from it."""
    if value is None:
        return "-"
    text = f"{value.median:.{digits}f}"
    ends = f"{value.least:.{digits}f} to {value.most:.{digits}f}"
    return text if ends == f"{text} to {text}" else f"{text} ({ends})"


def load_average(rows: Sequence[Row]) -> str:
    """The machine's while these were measured, from the least to the greatest."""
    loads = [row["load_average"] for row in rows]
    return " to ".join(f"{load:g}" for load in sorted({min(loads), max(loads)}))


def name_of(one: Figures) -> str:
    """The group that a line belongs to."""
    return one.workload if one.kind in one.workload.split(":") else f"{one.workload}/{one.kind}"


def sameness(one: Figures) -> str:
    """Whether it said what vanilla says."""
    if not one.compared:
        return "-"
    if not one.different:
        return "yes"
    margin = "no margin known" if one.largest_margin is None else f"margin at most {one.largest_margin:.2g}"
    ties = "all" if one.ties == one.different else one.ties
    return f"{one.different} of {one.compared} differ, {margin}, {ties} within rounding"


def cells(one: Figures) -> list[str]:
    """A line of the main table."""
    return [
        name_of(one),
        f"{one.temperature:g}",
        method_name(one),
        spread(one.tokens_per_second, 1),
        spread(one.speedup.get("vanilla")),
        *("-" if tau is None else f"{tau:.2f}" for tau in (one.tau, one.tau_without_loops)),
        spread(one.prefill_seconds),
        f"{one.memory_above_start / 1e6:,.0f} MB",
        "it is vanilla" if one.method == "vanilla" else sameness(one),
    ]


def method_name(one: Figures) -> str:
    """The method, and what it stood for where that is not the same."""
    if one.method != "auto":
        return one.method
    return f"auto ({', '.join(one.ran)})"


def against(figures: Sequence[Figures]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table of ratios against `transformers`; no lines without it."""
    bases = list(dict.fromkeys(base for one in figures for base in one.speedup if base.startswith("hf")))
    lines = [
        [name_of(one), f"{one.temperature:g}", method_name(one)]
        + [spread(one.speedup.get(base)) for base in bases]
        for one in figures
        if bases and not one.method.startswith("hf")
    ]
    return ["prompts", "T", "method", *(f"against {base}" for base in bases)], lines


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def speed_of(facts: Mapping[str, Any]) -> str:
    """What tokens per second are of, in a run with these facts."""
    if (batch := facts.get("batch", 1)) > 1:
        return f"up to {batch} answers side by side, from their submission to the end of the last one"
    return "decoding alone"


def report(figures: Sequence[Figures], run: Mapping[str, Any]) -> str:
    """Everything about a run that fits in a text."""
    facts = run["facts"]
    about = ", ".join(f"{name} {value}" for name, value in facts["environment"].items() if value is not None)
    parts = [
        f"`{run['command']}`",
        about,
        f"Begun {run['begun']}. Whole answers of at most {facts['max_new_tokens']} tokens; speeds are of "
        f"{speed_of(facts)}, median of {facts['repeats']} repeats (least to most); speedups are against "
        "vanilla in this run.",
        table(MAIN, [cells(one) for one in figures]),
    ]
    header, lines = against(figures)
    if lines:
        parts += ["Against `transformers` in the same run:", table(header, lines)]
    left_out = run.get("left_out", {})
    parts += [f"Left out: {name}: {why}." for name, why in left_out.items()]
    return "\n\n".join(parts) + "\n"
