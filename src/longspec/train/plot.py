"""Draw the loss and the acceptance of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.train.checkpoints import stage_runs
from longspec.train.report import METRICS, read_metrics


def plot(run: Path, output: Path | None = None) -> Path:
    """Draw all stages of a run so far, one after the other; returns the path of the picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"plotting needs: pip install 'longspec[train]' ({error})") from error
    runs = [(folder, read_metrics(folder / METRICS)) for folder in stage_runs(run)]
    if not any(lines for _, lines in runs):
        raise UserError(f"{run} has no {METRICS} with figures: is it the folder of a run?")
    figure = Figure(figsize=(11, 4), layout="constrained")
    loss, acceptance = figure.subplots(1, 2)
    offset = 0
    for index, (folder, lines) in enumerate(runs):
        name = folder.name if len(runs) > 1 else ""
        _draw_loss(loss, [line for line in lines if "loss" in line], offset, index, name)
        _draw_tau(acceptance, [line for line in lines if "eval_tau" in line], offset, index, name)
        offset += max((line["step"] for line in lines), default=0)
    loss.set(xlabel="step", ylabel="loss")
    acceptance.set(xlabel="step", ylabel="tau of a greedy chain, held out")
    for axes in (loss, acceptance):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    path = output or run / "plot.png"
    figure.savefig(path, dpi=120)
    return path


def _draw_loss(axes: Any, lines: list[dict[str, Any]], offset: int, index: int, name: str) -> None:
    steps = [offset + line["step"] for line in lines]
    axes.plot(steps, [line["loss"] for line in lines], color=f"C{index}", label=f"{name} draft".strip())
    own = [line["target_loss"] for line in lines]
    axes.plot(steps, own, color=f"C{index}", alpha=0.4, linestyle="--", label=f"{name} target".strip())


def _draw_tau(axes: Any, lines: list[dict[str, Any]], offset: int, index: int, name: str) -> None:
    steps = [offset + line["step"] for line in lines]
    axes.plot(steps, [line["eval_tau"] for line in lines], color=f"C{index}", marker="o", label=name or None)
