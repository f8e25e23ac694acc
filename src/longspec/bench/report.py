"""Runs as one HTML page that needs nothing else: no network, no script; whatever a model wrote is escaped."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from longspec.bench.folder import Row, read_run
from longspec.bench.markdown import MAIN, against, cells, load_average, speed_of
from longspec.bench.plots import PLOTS, draw_all
from longspec.bench.summary import Figures, summarise

# Of an answer that is shown; a long one says enough by its beginning.
_MOST_TOKENS = 400
_CAPTIONS = {
    "speedup_by_context": "Decoding speed against vanilla in the same run, by the prompt's length.",
    "acceptance_by_depth": "How many rounds kept a drafted token at each depth; one line per kind of prompt.",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  color: #1b1f24; background: #fff; }
h1, h2, h3 { line-height: 1.2; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 14px; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #d9dde2; text-align: left; }
td { font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.first td { border-top: 2px solid #8a929c; }
.scroll { overflow-x: auto; }
figure { display: inline-block; margin: 0 1rem 1rem 0; width: 32rem; max-width: 100%; }
figure img { width: 100%; }
figcaption, .small { color: #59636e; font-size: 13px; }
code { background: #f2f4f6; padding: .1rem .3rem; overflow-wrap: anywhere; }
.answer { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #d9dde2; border-radius: 4px;
  padding: .6rem .8rem; font: 13px/1.6 ui-monospace, monospace; }
.t { border-radius: 2px; }
.d0 { background: #e3e6ea; } .d1 { background: #d4efdc; } .d2 { background: #b3e2c4; }
.d3 { background: #8fd3ac; } .d4 { background: #6bc393; } .d5 { background: #4caf7d; }
"""
# Nothing is fetched and no script runs, even if an escape were missing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(runs: Sequence[Path], output: Path, num_answers: int = 4) -> None:
    """Write the page of one or more runs, finished or not."""
    from longspec.models.files import write_whole

    write_whole(output, page([(path.resolve().name, *read_run(path)) for path in runs], num_answers).encode())


def page(runs: Sequence[tuple[str, dict[str, Any], list[Row]]], num_answers: int) -> str:
    """The page, of runs with their names."""
    title = "LongSpec: " + ", ".join(name for name, _, _ in runs)
    body = "\n".join(_run(name, run, rows, num_answers) for name, run, rows in runs)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def _run(name: str, run: dict[str, Any], rows: list[Row], num_answers: int) -> str:
    figures, facts = summarise(rows), run["facts"]
    parts = [
        f"<h2>{escape(name)}</h2>",
        f"<p><code>{escape(run['command'])}</code></p>",
        f"<p>Begun {escape(run['begun'])}. Whole answers of at most {facts['max_new_tokens']} tokens. Speeds "
        f"are of {speed_of(facts)}; figures are medians of {facts['repeats']} repeats, least and most in "
        "brackets. A speedup is against vanilla in the same run. Memory is what an answer took beyond "
        "what was in use before it.</p>",
        _table(MAIN, [cells(one) for one in figures]),
    ]
    header, lines = against(figures)
    if lines:
        parts += ["<h3>Against transformers in the same run</h3>", _table(header, lines)]
    left_out = "".join(
        f"<li>{escape(what)}: {escape(why)}</li>" for what, why in run.get("left_out", {}).items()
    )
    parts.append(f"<p>Left out:</p><ul>{left_out}</ul>" if left_out else "")
    parts.append(_pictures(figures))
    parts += ["<h3>Where the tokens came from</h3>", _legend(), *_answers(rows, num_answers)]
    environment = [[what, str(value)] for what, value in facts["environment"].items() if value is not None]
    environment.append(["load average while it ran", load_average(rows)])
    parts += ["<h3>Environment</h3>", _table(("", ""), environment)]
    return "\n".join(parts)


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
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
    for name in PLOTS:
        if name in pictures:
            data = base64.b64encode(pictures[name]).decode()
            caption = escape(_CAPTIONS[name])
            shown.append(
                f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
                f"<figcaption>{caption}</figcaption></figure>"
            )
    return "\n".join(shown)


def _legend() -> str:
    shades = "".join(
        f'<span class="t d{depth}"> depth {depth}{" or more" if depth == 5 else ""} </span> '
        for depth in range(1, 6)
    )
    return (
        '<p class="small"><span class="t d0"> from the target itself </span> drafted and accepted at '
        f"{shades}Hold the pointer over a token for its depth.</p>"
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
    where = f"{row['workload']}/{row['item']}, temperature {row['temperature']:g}"
    about = f"{where}, {row['method']}, tau {tau:.2f}"
    texts = []
    for pieces, depths in zip(row["pieces"], row["depths"], strict=True):
        shown = [
            f'<span class="t d{min(depth, 5)}" title="depth {depth}">{escape(piece)}</span>'
            for piece, depth in zip(pieces[:_MOST_TOKENS], depths[:_MOST_TOKENS], strict=True)
        ]
        texts.append(f'<div class="answer">{"".join(shown)}</div>')
    return f'<p class="small">{escape(about)}</p>' + "".join(texts)
