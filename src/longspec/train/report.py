"""Where the figures of a run go: a progress bar, metrics.jsonl, TensorBoard, wandb, and a picture."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from longspec.atomic import write_whole
from longspec.errors import INSTALL_TRAINING, UserError
from longspec.progress import rich_bar
from longspec.train.checkpoints import stage_runs

if TYPE_CHECKING:
    from longspec.train.schema import LoggerSettings

Values = dict[str, Any]
METRICS = "metrics.jsonl"
_FIGURES = ("step", "loss", "target_loss", "eval_tau")


class Logger(Protocol):
    """Writes figures somewhere."""

    def log(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """One JSON object per line. When a run resumes at an earlier step, later lines are removed."""

    def __init__(self, path: Path, first_step: int) -> None:
        kept = [] if not first_step else [line for line in read_metrics(path) if line["step"] <= first_step]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = open(path, "a")  # noqa: SIM115 - closed by close()

    def log(self, step: int, values: Values) -> None:
        try:
            self._file.write(json.dumps({"step": step} | values) + "\n")
            self._file.flush()
        except OSError as error:
            error.filename = self._file.name  # a failed write does not name its file
            raise

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, run: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise UserError(f"logger.tensorboard needs: pip install tensorboard ({error})") from error
        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=first_step + 1)

    def log(self, step: int, values: Values) -> None:
        for name, value in flat(values).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights and Biases; offline it needs no login and writes to RUN/wandb."""

    def __init__(self, run: Path, settings: LoggerSettings, config: Values) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(f"logger.wandb needs: pip install '.[wandb]' ({error})") from error
        self._run = wandb.init(
            project=settings.project,
            name=run.name,
            dir=str(run),
            mode=settings.wandb,  # type: ignore[arg-type]
            config=config,
            resume="allow",
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(flat(values), step=step)

    def close(self) -> None:
        self._run.finish()


def make_loggers(run: Path, settings: LoggerSettings, config: Values, first_step: int) -> list[Logger]:
    if settings.wandb not in ("online", "offline", "disabled"):
        raise UserError(f"logger.wandb is {settings.wandb!r}; use online, offline or disabled")
    loggers: list[Logger] = [MetricsFile(run / METRICS, first_step)]
    if settings.tensorboard:
        loggers.append(TensorBoard(run, first_step))
    if settings.wandb != "disabled":
        loggers.append(WandB(run, settings, config))
    return loggers


def read_metrics(path: Path) -> list[Values]:
    """The lines of a run's metrics, without a last line that is incomplete after a kill."""
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):  # only the last line can be incomplete
            values = json.loads(line)  # not with `records`, because the loss of a failed run is NaN
            if isinstance(values, dict) and all(_is_number(values.get(name, 0)) for name in _FIGURES):
                lines += [values] if "step" in values else []
    return lines


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not abs(value) > 2**53


def flat(values: Values) -> dict[str, float]:
    """The figures with flat names, such as acceptance/lag_2."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": float(figure) for inner, figure in value.items()}
        elif isinstance(value, list):
            found |= {f"{name}/{index + 1}": float(figure) for index, figure in enumerate(value)}
        elif value is not None:
            found[name] = float(value)
    return found


@contextlib.contextmanager
def training_bar(label: str, total: int, done: int, show: bool) -> Iterator[Any]:
    """A progress bar over the steps; yields `update(step, values)`. Without a terminal it prints lines."""
    if not show:
        yield lambda step, values: None
        return
    if not sys.stderr.isatty():
        yield lambda step, values: print(
            f"{label} {step}/{total} {summary(values)}", file=sys.stderr, flush=True
        )
        return
    with rich_bar(label, total, "{task.fields[figures]}", done=done, keep=True, figures="") as update_bar:
        yield lambda step, values: update_bar(completed=step, figures=summary(values))


def summary(values: Values) -> str:
    parts = []
    if "loss" in values:
        parts += [f"loss {values['loss']:.3f}", f"target {values['target_loss']:.3f}"]
        by_lag = " ".join(f"{share:.2f}" for share in values["acceptance"].values())
        parts += [f"acceptance {by_lag}", f"{values['tokens_per_second']:,.0f} tokens/s"]
    if "eval_tau" in values:
        parts.append(f"tau {values['eval_tau']:.2f}")
    return ", ".join(parts)


def plot(run: Path, output: Path | None = None) -> Path:
    """Draw all stages of a run so far, one after the other; returns the path of the picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"plotting needs: {INSTALL_TRAINING} ({error})") from error
    runs = [(folder, read_metrics(folder / METRICS)) for folder in stage_runs(run)]
    if not any(lines for _, lines in runs):
        raise UserError(f"{run} has no {METRICS} with figures: is it the folder of a run?")
    figure = Figure(figsize=(11, 4), layout="constrained")
    loss, acceptance = figure.subplots(1, 2)
    offset = 0
    for index, (folder, lines) in enumerate(runs):
        name = folder.name if len(runs) > 1 else ""
        with_loss = [line for line in lines if {"loss", "target_loss"} <= line.keys()]
        _draw_loss(loss, with_loss, offset, index, name)
        _draw_tau(acceptance, [line for line in lines if "eval_tau" in line], offset, index, name)
        offset += max((line["step"] for line in lines), default=0)
    loss.set(xlabel="step", ylabel="loss")
    acceptance.set(xlabel="step", ylabel="tau of a greedy chain, held out")
    for axes in (loss, acceptance):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    path = output or run / "plot.png"
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    write_whole(path, picture.getvalue())
    return path


def _draw_loss(axes: Any, lines: list[dict[str, Any]], offset: int, index: int, name: str) -> None:
    steps = [offset + line["step"] for line in lines]
    axes.plot(steps, [line["loss"] for line in lines], color=f"C{index}", label=f"{name} draft".strip())
    own = [line["target_loss"] for line in lines]
    axes.plot(steps, own, color=f"C{index}", alpha=0.4, linestyle="--", label=f"{name} target".strip())


def _draw_tau(axes: Any, lines: list[dict[str, Any]], offset: int, index: int, name: str) -> None:
    steps = [offset + line["step"] for line in lines]
    axes.plot(steps, [line["eval_tau"] for line in lines], color=f"C{index}", marker="o", label=name or None)
