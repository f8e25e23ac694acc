"""The README's picture, drawn from committed results: speed beside vLLM and `transformers`.

`python benchmarks/plot_readme.py` writes docs/speed.png. The background is transparent and the text grey, so
that it reads on a light page and on a dark one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from longspec.atomic import write_whole
from longspec.bench.folder import read_run
from longspec.bench.plots import to_png
from longspec.bench.report import fastest_peer
from longspec.bench.summary import Figures, summarise

DOCS = Path(__file__).parents[1] / "docs"
GREY = "#848d97"
COLOURS = {
    "transformers": "#a371f7",
    "vLLM 0.25": "#d29922",
    "LongSpec vanilla": "#58a6ff",
    "LongSpec auto": "#2da44e",
}
METHOD = "auto"


def draw(results: Path) -> Figure:
    """Beside vLLM by batch and by context, beside the fastest way of `transformers` by kind of prompt. Each
    panel's title says first how many times as fast."""
    measured = json.loads((results / "beside-vllm.json").read_text(encoding="utf-8"))
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    batch, context, peers = figure.subplots(1, 3, width_ratios=(1.2, 1, 0.95))
    batch.set_yscale("log")
    draw_lines(batch, measured["by_batch"])
    draw_lines(context, measured["by_context"])
    context.set_ylim(0, 1.12 * context.get_ylim()[1])
    draw_transformers(peers, results)
    for axes in (batch, context, peers):
        axes.patch.set_alpha(0)
        axes.tick_params(colors=GREY, which="both", length=0, labelsize=11)
        for part in (axes.title, axes.xaxis.label, axes.yaxis.label):
            part.set_color(GREY)
            part.set_fontsize(13 if part is axes.title else 11.5)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(GREY)
    figure.patch.set_alpha(0)
    handles = [Line2D([], [], color=colour, linewidth=4) for colour in COLOURS.values()]
    figure.legend(
        handles, COLOURS, loc="outside lower center", ncols=len(COLOURS), frameon=False, labelcolor=GREY,
        fontsize=12.5,
    )  # fmt: skip
    return figure


def draw_lines(axes: Any, panel: dict[str, Any]) -> None:
    """A line for each engine; the last one's points say how many times as fast as the first it is."""
    places, names = range(len(panel["x"])), list(panel["series"])
    for name, values in panel["series"].items():
        axes.plot(places, values, color=COLOURS[name], marker="o", linewidth=2.5)
    first, last = panel["series"][names[0]], panel["series"][names[-1]]
    for place, base, value in zip(places, first, last, strict=True):
        label = f"{value / base:.1f}×" if base else f"{value:,}"
        axes.annotate(
            label, (place, value), (0, 7), textcoords="offset points", ha="center",
            color=COLOURS[names[-1]], weight="bold", fontsize=12,
        )  # fmt: skip
    axes.set_xticks(places, [f"{x:,}" for x in panel["x"]])
    ratios = [value / base for base, value in zip(first, last, strict=True) if base]
    title = f"{_span(ratios)} vLLM\n{panel['title']}"
    axes.set(title=title, xlabel=panel["x_label"], ylabel=panel["y_label"])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color=GREY, alpha=0.25)
    axes.margins(x=0.08, y=0.14)


def draw_transformers(axes: Any, results: Path) -> None:
    """How many times as fast as the fastest way of `transformers`, kind by kind."""
    bars: list[tuple[str, float]] = []
    for folder, machine in (("gpu-transformers", "H200"), ("cpu-transformers", "CPU")):
        for one in summarise(read_run(results / folder)[1]):
            peer = fastest_peer(one)
            if one.method == METHOD and peer is not None and one.kind != "all":
                bars.append((f"{_named(one)}, {machine}", one.speedup[peer].median))
    names, ratios = zip(*bars, strict=True)
    drawn = axes.barh(range(len(bars)), ratios, 0.75, color=COLOURS["LongSpec auto"])
    axes.bar_label(drawn, [f"{ratio:.1f}×" for ratio in ratios], padding=3, fontsize=11, color=GREY)
    axes.axvline(1, color=COLOURS["transformers"], linewidth=2)
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    title = f"{_span(ratios)} transformers\nSmolLM2-135M by prompt"
    axes.set(title=title, xlabel="speed, transformers = 1")


def _span(ratios: Iterable[float]) -> str:
    least, *_, most = (f"{ratio:.1f}" for ratio in sorted(ratios))
    return f"{least}×" if least == most else f"{least} to {most}×"


def _named(one: Figures) -> str:
    return f"{one.kind} ({one.prompt_tokens:,})" if one.prompt_tokens > 1000 else one.kind


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=DOCS / "results", help="(%(default)s)")
    parser.add_argument("--output", type=Path, default=DOCS / "speed.png", help="(%(default)s)")
    arguments = parser.parse_args()
    write_whole(arguments.output, to_png(draw(arguments.results)))
    print(arguments.output)


if __name__ == "__main__":
    main()
