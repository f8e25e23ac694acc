"""A whole benchmark: workloads and methods by name, a run's folder, the figures at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from longspec.api import LongSpec
from longspec.bench.environment import command_line, environment
from longspec.bench.folder import RunFolder, read_run
from longspec.bench.markdown import report
from longspec.bench.plots import draw_all
from longspec.bench.run import Plan, measure
from longspec.bench.runners import OurMethod, Runner
from longspec.bench.summary import Figures, summarise, to_json
from longspec.bench.workloads import Workload, fitting
from longspec.decoding.methods.registry import read_label
from longspec.errors import UserError
from longspec.models.files import write_whole
from longspec.progress import Advance


@dataclass(frozen=True)
class Settings:
    """What a benchmark does with its workloads."""

    methods: Sequence[str]
    temperatures: Sequence[float] = (0.0,)
    repeats: int = 3
    max_new_tokens: int = 64
    limit: int | None = None
    """Only so many prompts of each kind."""
    batch: int = 1
    """So many prompts of one kind are answered side by side."""

    def __post_init__(self) -> None:
        for label in self.methods:
            read_label(label)
        for name, least in {"repeats": 1, "max_new_tokens": 2, "limit": 1, "batch": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; it must be at least {least}")
        if not self.temperatures or min(self.temperatures) < 0:
            raise UserError(f"temperatures are {list(self.temperatures)}; give one or more, none below 0")

    @property
    def labels(self) -> list[str]:
        """The methods, each once, vanilla first: it is what the others are held against."""
        return list(dict.fromkeys(("vanilla", *self.methods)))


def bench(
    model: LongSpec,
    workloads: Sequence[Workload],
    settings: Settings,
    output: Path,
    others: Sequence[Runner] = (),
    left_out: dict[str, str] | None = None,
    bar: Callable[[int], AbstractContextManager[Advance]] = lambda total: nullcontext(lambda number: None),
) -> list[Figures]:
    """Measure into `output`, or go on with what is there; writes summary.json, report.md and plots.

    `others` are measured beside our methods. `bar` is told how many rows there will be and gives what is to
    be called for each.
    """
    chosen = [fitting(one.first(settings.limit), model, settings.max_new_tokens) for one in workloads]
    runners: list[Runner] = [OurMethod(model, label) for label in settings.labels]
    runners += others
    plan = Plan(chosen, settings.temperatures, settings.repeats, settings.max_new_tokens, settings.batch)
    facts = {
        "environment": environment(model),
        "methods": [runner.label for runner in runners],
        "temperatures": list(settings.temperatures),
        "repeats": settings.repeats,
        "max_new_tokens": settings.max_new_tokens,
        "batch": settings.batch,
        "workloads": {one.name: [item.id for item in one.items] for one in chosen},
    }
    short = {one.name: f"{one.left_out} prompts, by their length" for one in chosen if one.left_out}
    about = {
        "begun": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": command_line(),
        "left_out": short | (left_out or {}),
    }
    with RunFolder(output, facts, about) as folder, bar(plan.generations * len(runners)) as advance:
        measure(model, runners, plan, folder, advance)
    return conclude(output)


def conclude(folder: Path) -> list[Figures]:
    """Write what a run's rows say: summary.json, report.md and, with matplotlib, the plots."""
    run, rows = read_run(folder)
    figures = summarise(rows)
    try:
        write_whole(folder / "summary.json", json.dumps(to_json(figures), indent=1).encode() + b"\n")
        write_whole(folder / "report.md", report(figures, run).encode())
        for name, picture in draw_all(figures).items():
            write_whole(folder / f"{name}.png", picture)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; all rows are kept: make room and give the same "
            "command again"
        ) from error
    return figures
