"""A run as tables in Markdown, and as one HTML page that needs no network and no script."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from longspec.atomic import write_whole
from longspec.bench.folder import Row, read_run
from longspec.bench.plots import CAPTIONS, draw_all
from longspec.bench.summary import ALL, Figures, Spread, summarise

MAIN = (
    *("prompts", "T", "method", "tokens/s", "speedup", "tau", "no loops", "prefill s", "memory"),
    "same as vanilla",
)
# The page shows this many tokens of an answer.
_MOST_TOKENS = 400


def spread(value: Spread | None, digits: int = 2) -> str:
    """The median, with the least and the greatest where they differ from it."""
    if value is None:
        return "-"
    text = f"{value.median:.{digits}f}"
    ends = f"{value.least:.{digits}f} to {value.most:.{digits}f}"
    return text if ends == f"{text} to {text}" else f"{text} ({ends})"


def load_averages(rows: Sequence[Row]) -> str:
    """The least and the greatest load of the machine while these rows were measured."""
    loads = [row["load_average"] for row in rows]
    return " to ".join(f"{load:g}" for load in sorted({min(loads), max(loads)}))


def sameness(one: Figures) -> str:
    if not one.compared:
        return "-"
    if not one.different:
        return "yes"
    margin = "no margin known" if one.largest_margin is None else f"margin at most {one.largest_margin:.2g}"
    ties = "all" if one.ties == one.different else one.ties
    return f"{one.different} of {one.compared} differ, {margin}, {ties} within rounding"


def cells(one: Figures) -> list[str]:
    return [
        one.name,
        f"{one.temperature:g}",
        _method_name(one),
        spread(one.tokens_per_second, 1),
        spread(one.speedup.get("vanilla")),
        *("-" if tau is None else f"{tau:.2f}" for tau in (one.tau, one.tau_without_loops)),
        spread(one.prefill_seconds),
        f"{one.memory_above_start / 1e6:,.0f} MB",
        "it is vanilla" if one.method == "vanilla" else sameness(one),
    ]


def _method_name(one: Figures) -> str:
    """The method, and for `auto` the methods that it chose."""
    return f"auto ({', '.join(one.ran)})" if one.method == "auto" else one.method


def fastest_peer(one: Figures) -> str | None:
    peers = [name for name in one.speedup if name.startswith("hf")]
    return min(peers, key=lambda name: one.speedup[name].median, default=None)


def _against_peers(figures: Sequence[Figures]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table of ratios against `transformers`; no lines without it."""
    bases = list(dict.fromkeys(base for one in figures for base in one.speedup if base.startswith("hf")))
    lines = [
        [one.name, f"{one.temperature:g}", _method_name(one)]
        + [spread(one.speedup.get(base)) for base in bases]
        for one in figures
        if bases and not one.method.startswith("hf")
    ]
    return ["prompts", "T", "method", *(f"against {base}" for base in bases)], lines


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def repeats_text(repeats: int, shows_range: bool = True) -> str:
    if repeats == 1:
        return "one repeat"
    return f"median of {repeats} repeats{' (least to most)' if shows_range else ''}"


def about(run: Mapping[str, Any], shows_range: bool = True) -> str:
    """What was measured and how. `shows_range` says whether the table also has the least and the most."""
    facts = run["facts"]
    speed = "decoding alone"
    if (batch := facts.get("batch", 1)) > 1:
        speed = f"up to {batch} answers side by side, from their submission to the end of the last one"
    return (
        f"Begun {run['begun']}. Whole answers of at most {facts['max_new_tokens']} tokens; speeds are of "
        f"{speed}, {repeats_text(facts['repeats'], shows_range)}; speedups are against vanilla in this run. "
        "tau is how many tokens a round emits."
    )


def markdown(figures: Sequence[Figures], run: Mapping[str, Any]) -> str:
    environment = run["facts"]["environment"].items()
    parts = [
        f"`{run['command']}`",
        ", ".join(f"{name} {value}" for name, value in environment if value is not None),
        about(run),
        table(MAIN, [cells(one) for one in figures]),
    ]
    header, lines = _against_peers(figures)
    if lines:
        parts += ["Against `transformers` in the same run:", table(header, lines)]
    parts += [f"Left out: {name}: {why}." for name, why in run.get("left_out", {}).items()]
    return "\n\n".join(parts) + "\n"


def write_page(runs: Sequence[Path], output: Path, num_answers: int = 4) -> None:
    write_whole(output, page([(path.resolve().name, *read_run(path)) for path in runs], num_answers).encode())


def page(runs: Sequence[tuple[str, dict[str, Any], list[Row]]], num_answers: int) -> str:
    """The page of runs with their names. What a model wrote is escaped, as all values are."""
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html").render(
        title=f"LongSpec: {runs[0][0]}" if len(runs) == 1 else "LongSpec benchmarks",
        style=(folder / "report.css").read_text(encoding="utf-8"),
        runs=[_page_values(name, run, rows, num_answers) for name, run, rows in runs],
    )


def _page_values(name: str, run: dict[str, Any], rows: list[Row], num_answers: int) -> dict[str, Any]:
    figures = summarise(rows)
    peer_header, peer_lines = _against_peers(figures)
    facts = run["facts"]["environment"] | {"load average while it ran": load_averages(rows)}
    return {
        "name": name,
        "cards": _cards(figures),
        "about": about(run),
        "command": run["command"],
        "pictures": [
            (base64.b64encode(picture).decode(), CAPTIONS[name])
            for name, picture in draw_all(figures).items()
        ],
        "header": MAIN,
        "lines": [cells(one) for one in figures],
        "peer_header": peer_header,
        "peer_lines": peer_lines,
        "left_out": run.get("left_out", {}),
        "answers": [_answer(row) for row in _chosen(rows, num_answers)],
        "environment": [[what, str(value)] for what, value in facts.items() if value is not None],
    }


def headline_of(figures: Sequence[Figures]) -> Figures | None:
    """The figures of `auto`, or of the fastest method, over all prompts of a workload."""
    ours = [
        one for one in figures if "vanilla" in one.speedup and not one.method.startswith(("hf", "vanilla"))
    ]
    wide = [one for one in ours if one.kind == ALL] or ours
    fastest = max(wide, key=lambda one: one.speedup["vanilla"].median, default=None)
    return next((one for one in wide if one.method == "auto"), fastest)


def _cards(figures: Sequence[Figures]) -> list[tuple[str, str]]:
    """The headline numbers, and what each of them is."""
    one = headline_of(figures)
    if one is None:
        return []
    where = f"{one.method} on {one.name}, temperature {one.temperature:g}"
    found = [(f"{one.speedup['vanilla'].median:.2f}×", f"as fast as vanilla: {where}")]
    if (peer := fastest_peer(one)) is not None:
        found.append((f"{one.speedup[peer].median:.2f}×", f"as fast as transformers at its fastest ({peer})"))
    found.append((f"{one.tokens_per_second.median:,.1f}", "tokens per second"))
    if one.tau is not None:
        found.append((f"{one.tau:.2f}", "tokens per round (tau)"))
    if one.compared:
        found.append((f"{one.compared - one.different} of {one.compared}", "answers the same as vanilla's"))
    return found


def _chosen(rows: Sequence[Row], number: int) -> list[Row]:
    """A few answers, of the methods that drafted most, each of another kind while there are some."""
    drafted = [row for row in rows if any(any(depths or []) for depths in row.get("depths", []))]
    drafted.sort(key=lambda row: row["rounds"] / max(1, row["decoded_tokens"]))
    first = {(row["workload"], row["kind"]): row for row in reversed(drafted)}.values()
    best = [row for row in drafted if any(row is one for one in first)]
    others = [row for row in drafted if not any(row is one for one in first)]
    return [*best, *others][:number]


def _answer(row: Row) -> dict[str, Any]:
    tau = row["decoded_tokens"] / row["rounds"]
    return {
        "about": f"{row['workload']}/{row['item']}, temperature {row['temperature']:g}, {row['method']}, "
        f"tau {tau:.2f}",
        "turns": [
            list(zip(pieces[:_MOST_TOKENS], depths[:_MOST_TOKENS], strict=True))
            for pieces, depths in zip(row["pieces"], row["depths"], strict=True)
        ],
    }
