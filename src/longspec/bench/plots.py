"""The figures as pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from longspec.bench.summary import ALL, Figures

CAPTIONS = {
    "speedup": "Decoding speed against vanilla in the same run.",
    "acceptance_by_depth": "How many rounds kept a drafted token at each depth, by kind of prompt.",
}


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def draw_all(figures: Sequence[Figures]) -> dict[str, bytes]:
    """PNG pictures by name, where there is something to show; nothing without matplotlib."""
    if not can_draw():
        return {}
    drawn = {"speedup": _draw_speedup(figures), "acceptance_by_depth": _draw_acceptance(figures)}
    return {name: to_png(figure) for name, figure in drawn.items() if figure is not None}


def to_png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    # Without matplotlib's version in it, the same figures give the same bytes.
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def canvas_of(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _group(one: Figures, figures: Sequence[Figures]) -> str:
    """The shortest name that tells these prompts from the others."""
    name = one.name if len({other.workload for other in figures}) > 1 else one.kind
    return name if len({other.temperature for other in figures}) == 1 else f"{name}, T={one.temperature:g}"


def _draw_speedup(figures: Sequence[Figures]) -> Any:
    """Lines over the prompt's length where the kinds are lengths, otherwise bars by kind."""
    measured = [one for one in figures if "vanilla" in one.speedup and one.method != "vanilla"]
    if not measured:
        return None
    kinds = [one for one in measured if one.kind != ALL]
    if all(one.kind.isdecimal() for one in kinds) and len({one.kind for one in kinds}) > 1:
        return _draw_lines(kinds)
    return _draw_bars(measured)


def _draw_bars(figures: Sequence[Figures]) -> Any:
    groups = list(dict.fromkeys(_group(one, figures) for one in figures))
    methods = list(dict.fromkeys(one.method for one in figures))
    thickness = 0.8 / len(methods)
    canvas = canvas_of(7, 1.2 + 0.24 * len(groups) * max(len(methods), 2))
    axes = canvas.subplots()
    for number, method in enumerate(methods):
        own = {_group(one, figures): one.speedup["vanilla"] for one in figures if one.method == method}
        places = [groups.index(group) + (number - (len(methods) - 1) / 2) * thickness for group in own]
        medians = [ratio.median for ratio in own.values()]
        bars = axes.barh(places, medians, thickness * 0.9, color=f"C{number}", label=method)
        axes.bar_label(bars, [f"{median:.2f}" for median in medians], padding=3, fontsize="small")
    axes.axvline(1, color="0.4", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set(xlabel="decoding speed, vanilla = 1")
    axes.margins(x=0.1)
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    canvas.legend(loc="outside upper center", ncols=min(4, len(methods)), fontsize="small")
    return canvas


def _draw_lines(figures: Sequence[Figures]) -> Any:
    canvas = canvas_of(7, 3.6)
    axes = canvas.subplots()
    lines: dict[str, list[Figures]] = {}
    for one in sorted(figures, key=lambda one: one.prompt_tokens):
        lines.setdefault(f"{one.method}, {one.workload}, T={one.temperature:g}", []).append(one)
    for number, (label, own) in enumerate(lines.items()):
        ratios = [one.speedup["vanilla"] for one in own]
        errors = [[one.median - one.least for one in ratios], [one.most - one.median for one in ratios]]
        axes.errorbar(
            [one.prompt_tokens for one in own], [one.median for one in ratios], yerr=errors,
            color=f"C{number}", marker="o", capsize=3, label=label,
        )  # fmt: skip
    axes.axhline(1, color="0.4", linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="prompt tokens", ylabel="decoding speed, vanilla = 1")
    axes.grid(alpha=0.3)
    canvas.legend(loc="outside upper center", ncols=min(3, len(lines)), fontsize="small")
    return canvas


def _draw_acceptance(figures: Sequence[Figures]) -> Any:
    """One panel per method, one line per kind in its own colour."""
    drafted = [one for one in figures if one.kind != ALL and one.acceptance]
    methods = list(dict.fromkeys(one.method for one in drafted))
    if not drafted:
        return None
    groups = list(dict.fromkeys(_group(one, drafted) for one in drafted))
    canvas = canvas_of(7, 0.6 + 2.6 * len(methods))
    panels = canvas.subplots(len(methods), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    shown: dict[str, Any] = {}
    for method, axes in zip(methods, panels, strict=True):
        for one in (one for one in drafted if one.method == method):
            group, depths = _group(one, drafted), range(1, len(one.acceptance) + 1)
            # There are ten colours; further kinds use them again with a dashed line.
            number = groups.index(group)
            style = "-" if number < 10 else "--"
            (shown[group],) = axes.plot(depths, one.acceptance, style, color=f"C{number % 10}", marker="o")
        axes.set(title=method, ylabel="share of rounds", ylim=(0, 1.04))
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("depth")
    canvas.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize="small")
    return canvas
