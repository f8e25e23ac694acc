"""A run for people: tables in Markdown, and one HTML page that needs no network and no script."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from longspec.bench.folder import Row, read_run
from longspec.bench.plots import PLOTS, draw_all
from longspec.bench.summary import ALL, Figures, Spread, summarise
from longspec.models.files import write_whole

MAIN = (
    *("prompts", "T", "method", "tokens/s", "speedup", "tau", "no loops", "prefill s", "memory"),
    "same as vanilla",
)
# Of an answer that is shown; a long one says enough by its beginning.
_MOST_TOKENS = 400
# Nothing is fetched and no script runs, even if an escape were missing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def spread(value: Spread | None, digits: int = 2) -> str:
    """The median, and the least and the greatest where they differ from it."""
    if value is None:
        return "-"
    text = f"{value.median:.{digits}f}"
    ends = f"{value.least:.{digits}f} to {value.most:.{digits}f}"
    return text if ends == f"{text} to {text}" else f"{text} ({ends})"


def load_averages(rows: Sequence[Row]) -> str:
    """The machine's load while these were measured, from the least to the greatest."""
    loads = [row["load_average"] for row in rows]
    return " to ".join(f"{load:g}" for load in sorted({min(loads), max(loads)}))


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
    """The method, and for `auto` what it settled on."""
    return f"auto ({', '.join(one.ran)})" if one.method == "auto" else one.method


def fastest_peer(one: Figures) -> str | None:
    """The fastest way of `transformers` in the same run."""
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
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def repeats_text(repeats: int) -> str:
    """What the figures of so many repeats are."""
    return "one repeat" if repeats == 1 else f"median of {repeats} repeats (least to most)"


def about(run: Mapping[str, Any]) -> str:
    """How a run was measured, in two sentences."""
    facts = run["facts"]
    speed = "decoding alone"
    if (batch := facts.get("batch", 1)) > 1:
        speed = f"up to {batch} answers side by side, from their submission to the end of the last one"
    return (
        f"Begun {run['begun']}. Whole answers of at most {facts['max_new_tokens']} tokens; speeds are of "
        f"{speed}, {repeats_text(facts['repeats'])}; speedups are against vanilla in this run."
    )


def markdown(figures: Sequence[Figures], run: Mapping[str, Any]) -> str:
    """Everything about a run that fits in a text."""
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


# The page; whatever a model wrote is escaped


def write_page(runs: Sequence[Path], output: Path, num_answers: int = 4) -> None:
    """Write the page of one or more runs, finished or not."""
    write_whole(output, page([(path.resolve().name, *read_run(path)) for path in runs], num_answers).encode())


def page(runs: Sequence[tuple[str, dict[str, Any], list[Row]]], num_answers: int) -> str:
    """The page, of runs with their names."""
    alone = len(runs) == 1
    title = f"LongSpec: {runs[0][0]}" if alone else "LongSpec benchmarks"
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    body = "\n".join(
        ("" if alone else f"<h2>{escape(name)}</h2>\n") + _run(run, rows, num_answers)
        for name, run, rows in runs
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def _run(run: dict[str, Any], rows: list[Row], num_answers: int) -> str:
    figures = summarise(rows)
    parts = [
        _cards(figures),
        f"<p>{escape(about(run))} tau is how many tokens a round emits. Memory is what an answer took "
        "beyond what was in use before it.</p>",
        f"<p><code>{escape(run['command'])}</code></p>",
        _pictures(figures),
        _html_table(MAIN, [cells(one) for one in figures]),
    ]
    header, lines = _against_peers(figures)
    if lines:
        parts += ["<h3>Against transformers in the same run</h3>", _html_table(header, lines)]
    left_out = "".join(
        f"<li>{escape(what)}: {escape(why)}</li>" for what, why in run.get("left_out", {}).items()
    )
    parts.append(f"<p>Left out:</p><ul>{left_out}</ul>" if left_out else "")
    parts += ["<h3>Where the tokens came from</h3>", _legend(), *_answers(rows, num_answers)]
    facts = run["facts"]["environment"].items()
    environment = [[what, str(value)] for what, value in facts if value is not None]
    environment.append(["load average while it ran", load_averages(rows)])
    parts += ["<h3>Environment</h3>", _html_table(("", ""), environment)]
    return "\n".join(parts)


def headline_of(figures: Sequence[Figures]) -> Figures | None:
    """The figures that sum a run up: of `auto`, or of the fastest method, over all prompts of a workload."""
    ours = [
        one for one in figures if "vanilla" in one.speedup and not one.method.startswith(("hf", "vanilla"))
    ]
    wide = [one for one in ours if one.kind == ALL] or ours
    fastest = max(wide, key=lambda one: one.speedup["vanilla"].median, default=None)
    return next((one for one in wide if one.method == "auto"), fastest)


def _cards(figures: Sequence[Figures]) -> str:
    """The headline numbers."""
    one = headline_of(figures)
    if one is None:
        return ""
    where = f"{one.method} on {one.name}, temperature {one.temperature:g}"
    found = [(f"{one.speedup['vanilla'].median:.2f}×", f"as fast as vanilla: {where}")]
    if (peer := fastest_peer(one)) is not None:
        found.append((f"{one.speedup[peer].median:.2f}×", f"as fast as transformers at its fastest ({peer})"))
    found.append((f"{one.tokens_per_second.median:,.1f}", "tokens per second"))
    if one.tau is not None:
        found.append((f"{one.tau:.2f}", "tokens per round (tau)"))
    if one.compared:
        found.append((f"{one.compared - one.different} of {one.compared}", "answers the same as vanilla's"))
    shown = "".join(
        f'<div class="card"><b>{escape(number)}</b>{escape(what)}</div>' for number, what in found
    )
    return f'<div class="cards">{shown}</div>'


def _html_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body, before = [], None
    for line in lines:
        begins = ' class="first"' if len(line) > 2 and before not in (None, line[0]) else ""
        body.append(f"<tr{begins}>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>")
        before = line[0]
    rows = "\n".join(body)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _pictures(figures: Sequence[Figures]) -> str:
    pictures = draw_all(figures)
    if not pictures:
        return "<p>No plots: pip install 'longspec[bench]'</p>"
    shown = []
    for name, picture in pictures.items():
        data, caption = base64.b64encode(picture).decode(), escape(PLOTS[name].caption)
        shown.append(
            f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    return "\n".join(shown)


def _legend() -> str:
    shades = "".join(
        f'<li><span class="t d{depth}">depth {depth}{" or more" if depth == 5 else ""}</span></li>'
        for depth in range(1, 6)
    )
    return (
        '<ul class="legend"><li><span class="t d0">the target itself</span></li>'
        f"<li>drafted and accepted at</li>{shades}</ul>\n"
        '<p class="small">Hold the pointer over a token to see its depth.</p>'
    )


def _answers(rows: Sequence[Row], number: int) -> list[str]:
    """A few answers, of the methods that drafted most, each of another kind while there are some."""
    drafted = [row for row in rows if any(any(depths or []) for depths in row.get("depths", []))]
    drafted.sort(key=lambda row: row["rounds"] / max(1, row["decoded_tokens"]))
    chosen: list[Row] = []
    for repeated in (False, True):
        for row in drafted:
            known = any((one["workload"], one["kind"]) == (row["workload"], row["kind"]) for one in chosen)
            if len(chosen) < number and row not in chosen and known == repeated:
                chosen.append(row)
    return [_answer(row) for row in chosen] or ["<p>No method of this run drafted anything.</p>"]


def _answer(row: Row) -> str:
    tau = row["decoded_tokens"] / row["rounds"]
    about = f"{row['workload']}/{row['item']}, temperature {row['temperature']:g}, {row['method']}"
    texts = [f'<p class="small">{escape(about)}, tau {tau:.2f}</p>']
    for turn, (pieces, depths) in enumerate(zip(row["pieces"], row["depths"], strict=True), 1):
        if len(row["pieces"]) > 1:
            texts.append(f'<p class="turn">Answer of turn {turn}</p>')
        shown = [
            f'<span class="t d{min(depth, 5)}" title="depth {depth}">{escape(piece)}</span>'
            for piece, depth in zip(pieces[:_MOST_TOKENS], depths[:_MOST_TOKENS], strict=True)
        ]
        texts.append(f'<div class="answer">{"".join(shown)}</div>')
    return "".join(texts)
