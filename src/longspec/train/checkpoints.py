"""Checkpoints of a run: folders that are complete or do not exist.

RUN/checkpoints/step-00000200/
    state.json      the step and what must not change; its list of files shows that the checkpoint is complete
    draft/          the draft as decoding loads it
    engine/         DeepSpeed's own files, which are pickles: trust only those you made
    random.pt       the random states of each process
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longspec.atomic import check_folder, is_empty, write_whole
from longspec.errors import UserError, reason_of
from longspec.records import read_record

_STATE = "state.json"
STAGES = "stages.json"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class CheckpointState:
    """What `state.json` says."""

    step: int
    num_steps: int
    tokens: int
    world_size: int
    files: dict[str, int]
    """Sizes by name."""
    micro_batch: int = 0
    """Sequences per micro-batch. A resumed run uses the same number, because rounding depends on it."""
    seconds: float = 0.0
    """How long the stage has run so far, if its time is limited."""
    acceptance: dict[str, Any] | None = None
    """The fields of `evaluate.Acceptance`, if it was measured."""


@dataclass(frozen=True)
class Stages:
    """What `stages.json` says."""

    stages: list[str]


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def building_folder(run: Path, step: int) -> Path:
    """Where a checkpoint is while it is written."""
    return run / "checkpoints" / f".building-{step:08d}"


def newest(run: Path) -> Path | None:
    """The newest complete checkpoint; damaged ones are skipped with a warning."""
    found = sorted(
        (path for path in (run / "checkpoints").glob("step-*") if _NAME.fullmatch(path.name)), reverse=True
    )
    for path in found:
        problem = _problem(path)
        if problem is None:
            return path
        warnings.warn(f"the checkpoint {path} is skipped: {problem}", stacklevel=2)
    return None


def _problem(path: Path) -> str | None:
    """What is missing from a checkpoint; None if it is complete."""
    try:
        state = read_state(path)
    except UserError as error:
        return str(error)
    for name, size in state.files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or cut short"
    return None


def finish(run: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Complete the checkpoint of a step, and remove all but the last `keep`."""
    building, goal = building_folder(run, step), folder_of(run, step)
    for script in building.glob("zero_to_*.py"):  # DeepSpeed's converters; `draft/` needs none
        script.unlink()
    files = {
        str(path.relative_to(building)): path.stat().st_size for path in building.rglob("*") if path.is_file()
    }
    for name in files:
        with open(building / name, "rb") as file:
            os.fsync(file.fileno())
    write_whole(building / _STATE, json.dumps(state | {"step": step, "files": files}, indent=1).encode())
    if goal.exists():  # a damaged one, because training would have resumed from a complete one
        shutil.rmtree(goal)
    building.rename(goal)
    sweep(run, keep)
    return goal


def read_state(checkpoint: Path) -> CheckpointState:
    return read_record(checkpoint / _STATE, CheckpointState)


def sweep(run: Path, keep: int) -> None:
    """Remove unfinished checkpoints that a killed run left, and those before the last `keep` whole ones."""
    found = sorted((run / "checkpoints").glob("step-*"))
    whole = [path for path in found if _problem(path) is None]
    leftovers = (run / "checkpoints").glob(".building-*")
    for path in [*leftovers, *(path for path in found if whole and path < whole[-keep:][0])]:
        shutil.rmtree(path, ignore_errors=True)


def save_random_states(path: Path) -> None:
    states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    data = io.BytesIO()  # because torch does not say why a file cannot be written
    torch.save(states, data)
    write_whole(path, data.getvalue())


def load_random_states(path: Path) -> None:
    with explained(path):
        states = torch.load(path, weights_only=False)
        torch.set_rng_state(states["torch"])
        np.random.set_state(states["numpy"])
        random.setstate(states["python"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Name what is damaged, whatever a library that reads it raises."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"cannot read {path}: {reason_of(error)}; remove that checkpoint to go on from the one before"
        ) from error


def check_place(run: Path, own: Iterable[str], resume: str | None) -> None:
    """Refuse to begin in a folder that is not empty, unless it has one of a run's `own` files or folders."""
    check_folder(run)
    if resume is None and not is_empty(run) and not any((run / name).exists() for name in own):
        raise UserError(f"{run} is not empty and has no run: give another run=FOLDER")


def note_stages(run: Path, names: list[str]) -> None:
    """Write the names of a run's stages; each stage is a run in its own folder."""
    run.mkdir(parents=True, exist_ok=True)
    write_whole(run / STAGES, json.dumps({"stages": names}).encode())


def stage_runs(run: Path) -> list[Path]:
    """The stages of a run so far, or the run itself if it has no stages."""
    if not (run / STAGES).is_file():
        return [run]
    folders = [run / name for name in read_record(run / STAGES, Stages).stages]
    return [folder for folder in folders if (folder / "checkpoints").is_dir()]


def newest_of(run: Path) -> Path:
    """The newest complete checkpoint of the newest stage of a run."""
    runs = stage_runs(run)
    checkpoint = newest(runs[-1]) if runs else None
    if checkpoint is None:
        raise UserError(f"the run {run} has no complete checkpoint to take a draft from")
    return checkpoint


def progress_of(run: Path) -> tuple[int, int]:
    """The steps done and the steps in total; (0, 1) if there is no complete checkpoint."""
    checkpoint = newest(run)
    if checkpoint is None:
        return 0, 1
    state = read_state(checkpoint)
    return state.step, state.num_steps


def draft_of(path: str) -> str:
    """The draft at a path; for a run, the draft of its newest checkpoint."""
    run = Path(path).expanduser()
    if not (run / "checkpoints").is_dir() and not (run / STAGES).is_file():
        return path
    return str(newest_of(run) / "draft")
