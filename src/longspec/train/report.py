"""Where the figures of a run go: a progress bar, metrics.jsonl, and optionally TensorBoard and wandb."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from longspec.errors import UserError
from longspec.progress import rich_bar
from longspec.train.schema import LoggerSettings

Values = dict[str, Any]
METRICS = "metrics.jsonl"


class Logger(Protocol):
    """Writes figures somewhere."""

    def log(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """One JSON object per line. When a run resumes at an earlier step, later lines are removed."""

    def __init__(self, path: Path, first_step: int) -> None:
        kept = [] if not first_step else [line for line in read_metrics(path) if line["step"] <= first_step]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(path, "a")  # noqa: SIM115 - closed by close()

    def log(self, step: int, values: Values) -> None:
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()

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
            raise UserError(f"logger.wandb needs: pip install 'longspec[wandb]' ({error})") from error
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
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                lines.append(values)
    return lines


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
    """The figures of a step in one line."""
    parts = []
    if "loss" in values:
        parts += [f"loss {values['loss']:.3f}", f"target {values['target_loss']:.3f}"]
        by_lag = " ".join(f"{share:.2f}" for share in values["acceptance"].values())
        parts += [f"acceptance {by_lag}", f"{values['tokens_per_second']:,.0f} tokens/s"]
    if "eval_tau" in values:
        parts.append(f"tau {values['eval_tau']:.2f}")
    return ", ".join(parts)
