"""The figures as pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from longspec.bench.summary import ALL, Figures

Draw = Callable[[Any, Sequence[Figures]], bool]


def draw_all(figures: Sequence[Figures]) -> dict[str, bytes]:
    """PNG pictures by name; those that have something to show. None at all where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        return {}
    from matplotlib.figure import Figure

    pictures = {}
    for name, draw in PLOTS.items():
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.subplots()
        if not draw(axes, figures):
            continue
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        buffer = io.BytesIO()
        # Without the version of matplotlib, the same figures give the same bytes.
        figure.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
        pictures[name] = buffer.getvalue()
    return pictures


def _kinds(figures: Sequence[Figures]) -> list[Figures]:
    return [one for one in figures if one.kind != ALL]


def _methods(figures: Sequence[Figures]) -> list[str]:
    return list(dict.fromkeys(one.method for one in figures))


def _speedup_by_context(axes: Any, figures: Sequence[Figures]) -> bool:
    for index, method in enumerate(_methods(figures)):
        own = [one for one in _kinds(figures) if one.method == method and "vanilla" in one.speedup]
        own.sort(key=lambda one: one.prompt_tokens)
        ratios = [one.speedup["vanilla"] for one in own]
        lower = [one.median - one.least for one in ratios]
        upper = [one.most - one.median for one in ratios]
        medians, lengths = [one.median for one in ratios], [one.prompt_tokens for one in own]
        # Only lengths of one kind of text make a curve; prompts of different kinds are points.
        line = "-" if all(one.kind.isdecimal() for one in own) else "none"
        style = {"color": f"C{index}", "marker": "o", "capsize": 3, "label": method, "linestyle": line}
        axes.errorbar(lengths, medians, yerr=[lower, upper], **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="prompt tokens", ylabel="decoding speed against vanilla")
    axes.legend()
    return True


def _acceptance_by_depth(axes: Any, figures: Sequence[Figures]) -> bool:
    drawn = False
    for index, method in enumerate(_methods(figures)):
        own = [one for one in _kinds(figures) if one.method == method and one.acceptance]
        for one in own:
            depths = range(1, len(one.acceptance) + 1)
            label = method if one is own[0] else None
            axes.plot(depths, one.acceptance, color=f"C{index}", marker="o", alpha=0.6, label=label)
            drawn = True
    axes.set(xlabel="depth", ylabel="share of rounds accepted there", ylim=(0, 1))
    axes.locator_params(axis="x", integer=True)
    if drawn:
        axes.legend()
    return drawn


PLOTS: dict[str, Draw] = {
    "speedup_by_context": _speedup_by_context,
    "acceptance_by_depth": _acceptance_by_depth,
}
