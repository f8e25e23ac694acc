"""The phases from a target to a draft, one after the other. A finished phase is skipped.

OUTPUT/work/plan.json    the plan, and what was asked for
OUTPUT/work/data/NAME    what the target wrote
OUTPUT/work/run/STAGE    the stages of training
OUTPUT/work/draft        the draft, until it is measured
OUTPUT/                  the draft, complete as soon as it has a config.json
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from longspec import hub
from longspec.atomic import check_folder, clear_unfinished, unfinished, write_whole
from longspec.bench.acceptance import note_acceptance
from longspec.bench.catalogue import load_workload
from longspec.bench.run import bench, conclude
from longspec.bench.settings import RunSetting
from longspec.bench.summary import Figures
from longspec.data.options import SynthesisOptions
from longspec.data.shards import is_finished, read_info
from longspec.data.synthesize import Writer, synthesize
from longspec.data.work import locked
from longspec.errors import INSTALL_TRAINING, UserError, check_same
from longspec.models.draft_files import draft_config_for
from longspec.models.files import read_config
from longspec.models.placement import gigabytes, pick_device, pick_dtype
from longspec.pipeline.card import duration, with_given
from longspec.pipeline.device import measure_device
from longspec.pipeline.options import DraftOptions
from longspec.pipeline.plan import TEMPERATURES, Plan, StagePlan, WrittenPlan, make_plan
from longspec.pipeline.sources import OWN_HELD_OUT, Sources, check_own
from longspec.prompts import PromptEncoder
from longspec.records import read_record
from longspec.train.checkpoints import note_stages, progress_of
from longspec.train.command import compose_config

_PLAN, _SPENT = "plan.json", "spent.json"
# Sequences that a stage is measured on while it trains; their KV must fit into memory at once.
_HELD_OUT_SEQUENCES, _HELD_OUT_TOKENS = 16, 2**18
# A stage with a budget ends when its time is over. If the device is faster than planned, the stage does more
# steps until then, at most this many times the planned ones.
_FASTER = 2
# The share of a budget that the last measurement keeps.
_MEASURING = 0.05
# Phases may use this share of the time that is left, because loading and preparing take time too.
_ALLOWED = 0.9
# A draft is measured with a chain and with trees of 64 nodes. With lookup, a tree of fewer levels is
# measured, too, because looked-up tokens can replace the last levels.
_CHAIN, _LEVELS, _LESS_DEEP, _NODES, _LOOKED_UP = 4, (8, *[16] * 7), 6, 64, 12


@dataclass(frozen=True)
class SavedPlan:
    """The content of `plan.json`."""

    asked: dict[str, Any]
    plan: Plan


@dataclass(frozen=True)
class Phase:
    """A part of the work."""

    name: str
    seconds: float
    """The planned time; 0 for a short phase."""
    is_done: Callable[[], bool]
    run: Callable[[float | None], object]
    """Called with the seconds that the phase may take; None without a limit."""


def plan_draft(options: DraftOptions) -> Plan:
    """The plan of the output folder, or a new one; nothing is written."""
    path = options.output / "work" / _PLAN
    if path.is_file():
        saved = read_record(path, SavedPlan)
        check_same(options.output, saved.asked, options.asked)
        return saved.plan
    check_folder(options.output)
    if options.output.exists() and any(found.name != "work" for found in options.output.iterdir()):
        raise UserError(f"{options.output} is not empty; give an --output that is new or empty")
    check_own(options)
    device = pick_device(options.device)
    files = hub.resolve(options.target, config_only=True)
    config = read_config(files.folder, files.config)
    from_draft = None
    if options.draft is not None:
        from_draft = draft_config_for(hub.resolve_draft(options.draft), config, options.target)
    tokenizer = hub.resolve_tokenizer(options.target)
    encoder = PromptEncoder(tokenizer.folder, tokenizer.chat_template)
    return make_plan(
        options.target,
        config,
        measure_device(device, pick_dtype(options.dtype, device)),
        has_template=bool(encoder.tokenizer.chat_template),
        seconds=options.seconds,
        tokens=options.tokens,
        from_draft=from_draft,
    )


def make_draft(
    options: DraftOptions, plan: Plan, tell: Callable[[str], None] = lambda line: None
) -> list[Figures]:
    """Do the phases of the plan that are not done yet; returns the measured figures."""
    _check_installed()
    work = options.output / "work"
    with locked(work):
        clear_unfinished(work)
        if not (work / _PLAN).is_file():
            _check_disk(work, plan.disk)
            saved = {"asked": options.asked, "plan": asdict(plan)}
            write_whole(work / _PLAN, json.dumps(saved, indent=1).encode())
        phases = list(_Making(options, plan, work).phases())
        Schedule(work, plan, tell).run(phases)
    return conclude(work / "measured")


class Schedule:
    """Runs phases, and gives each its share of the time that is left: what one phase saves, the later ones
    may use."""

    def __init__(self, work: Path, plan: Plan, tell: Callable[[str], None]) -> None:
        self._path, self._plan, self._tell = work / _SPENT, plan, tell
        self._spent = read_record(self._path, dict[str, float]) if self._path.is_file() else {}
        """Seconds of the finished phases."""

    def run(self, phases: list[Phase]) -> None:
        for number, phase in enumerate(phases):
            rest = [one for one in phases[number:] if not one.is_done()]
            if phase not in rest:
                continue
            planned = sum(one.seconds for one in rest)
            left, allowed = planned, None
            if self._plan.is_limited:
                left = max(0.0, self._plan.seconds - sum(self._spent.values()))
                allowed = max(1.0, phase.seconds * _ALLOWED * left / planned) if phase.seconds else None
            about = f", about {duration(allowed or phase.seconds)}" if phase.seconds else ""
            whole = f"; {duration(left)} left in all" if left else ""
            name = f"[{number + 1}/{len(phases)}] {phase.name}"
            self._tell(f"{name}{about}{whole}")
            started = time.perf_counter()
            phase.run(allowed)
            _free_memory()
            took = time.perf_counter() - started
            self._tell(f"{name} took {duration(took)}")
            self._spent[phase.name] = round(took, 1)
            write_whole(self._path, json.dumps(self._spent).encode())


class _Making:
    """The phases for one output folder."""

    def __init__(self, options: DraftOptions, plan: Plan, work: Path) -> None:
        # Absolute, because runs keep the names of their folders, and compare them when they go on.
        self._options, self._plan, self._work = options, plan, work.resolve()
        self._sources = Sources(self._work, plan, options)
        self._writer = Writer()

    def phases(self) -> Iterator[Phase]:
        sources, written = self._sources, {one.name: one for one in self._plan.written}
        yield self._file_phase("prompts for passages", "passage_prompts", sources.make_passage_prompts)
        yield self._write_phase(written.pop("passages"))
        yield self._file_phase(
            "documents to quote", "documents", lambda: sources.make_documents(self._tokenizer())
        )
        last = "long_prompts" if "long_prompts" in self._plan.num_prompts else "prompts"
        yield self._file_phase("prompts of many kinds", last, lambda: sources.make_prompts(self._tokenizer()))
        for one in written.values():
            yield self._write_phase(one)
        previous = None if self._options.draft is None else hub.resolve_draft(self._options.draft)
        for stage in self._plan.stages:
            yield self._train_phase(stage, previous)
            previous = self._work / "run" / stage.name
        draft = self._work / "draft"
        yield Phase("export", 0, draft.exists, lambda _: self._export(draft))
        summary = self._work / "measured" / "summary.json"
        reserved = _MEASURING * self._plan.seconds if self._plan.is_limited else 0.0
        yield Phase("measure", reserved, summary.is_file, self._measure)
        published = self._options.output / "config.json"
        yield Phase("publish", 0, published.is_file, lambda _: self._publish())

    def _file_phase(self, name: str, file: str, make: Callable[[], None]) -> Phase:
        path = self._sources.path(file)
        return Phase(name, 0, path.is_file, lambda _: make())

    def _tokenizer(self) -> Any:
        return PromptEncoder(hub.resolve_tokenizer(self._options.target).folder).tokenizer

    def _write_phase(self, one: WrittenPlan) -> Phase:
        folder = self._work / "data" / one.name
        return Phase(
            f"write {one.name}",
            one.seconds,
            lambda: is_finished(folder),
            lambda seconds: synthesize(self._synthesis(one, folder, seconds), True, self._writer),
        )

    def _synthesis(self, one: WrittenPlan, folder: Path, seconds: float | None) -> SynthesisOptions:
        files: dict[str, Any] = {one.mode: self._sources.path(one.source)} if one.source else {}
        return SynthesisOptions(
            folder,
            one.tokens,
            self._options.target,
            modes={one.mode: 1.0},
            temperatures=TEMPERATURES,
            max_new_tokens=one.max_new_tokens,
            max_question_tokens=min(128, one.seq_length // 3),
            given_tokens=one.given_tokens,
            seq_length=one.seq_length,
            shard_samples=one.shard_samples,
            seed=self._options.seed,
            device=self._options.device,
            dtype=self._options.dtype,
            seconds=seconds,
            **files,
        )

    def _train_phase(self, stage: StagePlan, previous: Path | None) -> Phase:
        run = self._work / "run" / stage.name

        def is_done() -> bool:
            step, num_steps = progress_of(run)
            return step == num_steps

        def go(seconds: float | None) -> None:
            from longspec.train.trainer import train

            self._writer.forget()
            _free_memory()
            note_stages(run.parent, [one.name for one in self._plan.stages])
            train(compose_config(self._overrides(stage, run, previous, seconds)))

        return Phase(f"train {stage.name}", stage.seconds, is_done, go)

    def _overrides(
        self, stage: StagePlan, run: Path, previous: Path | None, seconds: float | None
    ) -> list[str]:
        """The settings of a stage as Hydra reads them."""
        folders = [self._work / "data" / name for name in stage.datasets]
        last = read_info(folders[-1])
        num_sequences = last.num_sequences * last.seq_length // stage.seq_length
        held_out = min(_HELD_OUT_SEQUENCES, _HELD_OUT_TOKENS // stage.seq_length, num_sequences // 8)
        few = max(10, stage.steps // 10)
        values: dict[str, Any] = {
            "name": "draft",
            "run": str(run),
            "seed": self._options.seed,
            "target.path": self._options.target,
            "target.device": self._options.device,
            "target.dtype": self._options.dtype,
            "stage.seq_length": stage.seq_length,
            "stage.batch": stage.batch,
            "stage.num_steps": stage.steps * (_FASTER if seconds else 1),
            "stage.lr": stage.lr,
            "data.train": [str(folder) for folder in folders],
            "data.num_held_out": held_out,
            "evaluation.every": max(few, stage.steps // 4) if held_out else 0,
            "evaluation.gamma": min(_CHAIN, self._plan.max_lag),
            "evaluation.new_tokens": self._plan.max_new_tokens // 2,
            "saving.save_steps": few,
            "saving.log_steps": max(1, min(20, stage.steps // 5)),
            "saving.keep": 1,
            "saving.stage_seconds": seconds or 0.0,
        }
        values |= {} if previous is None else {"draft.path": str(previous)}
        return [f"stage={stage.name}", "resume=latest", *(f"{k}={_quoted(v)}" for k, v in values.items())]

    def _export(self, draft: Path) -> None:
        from longspec.train.export import export

        export(self._work / "run", draft)

    def _measure(self, _: float | None = None) -> None:
        """Measure tau by decoding, on prompts that the draft was not trained on."""
        from longspec.api import LongSpec

        plan, draft, own = self._plan, self._work / "draft", self._work / OWN_HELD_OUT
        model = LongSpec.from_pretrained(
            self._options.target,
            draft,
            device=self._options.device,
            dtype=self._options.dtype,
            calibrate=False,
            progress=True,
        )
        names = ["builtin", *([str(own)] if own.is_file() else [])]
        small = plan.max_new_tokens < 32
        setting = RunSetting(
            measured_methods(plan.max_lag)[: 1 if small else None],
            repeats=1,
            max_new_tokens=plan.max_new_tokens,
            limit=1 if small else None,
        )
        workloads = [load_workload(name, model) for name in names]
        if not plan.has_template:  # without one there is no second turn
            workloads = [
                replace(one, items=tuple(replace(item, turns=item.turns[:1]) for item in one.items))
                for one in workloads
            ]
        bench(model, workloads, setting, self._work / "measured")

    def _publish(self) -> None:
        """Add the measurements and the given documents to the draft, and copy it out of the work folder.

        The config comes last, because it makes the output a draft.
        """
        draft, output = self._work / "draft", self._options.output
        note_acceptance([self._work / "measured"], draft)
        card = (draft / "README.md").read_text(encoding="utf-8")
        write_whole(draft / "README.md", with_given(card, self._sources.path("documents")).encode())
        paths = sorted(draft.iterdir(), key=lambda path: path.name == "config.json")
        for path in paths:
            with unfinished(output / path.name) as copied:
                shutil.copy(path, copied)


def measured_methods(max_lag: int) -> list[str]:
    """The labels of the methods with which a draft of this depth is measured."""
    depths = sorted({min(_LESS_DEEP, max_lag), min(len(_LEVELS), max_lag)})
    trees = [f"tree:{'x'.join(map(str, _LEVELS[:depth]))}@{_NODES}" for depth in depths]
    return [f"seq:{min(_CHAIN, max_lag)}", trees[-1], *(f"{tree}+{_LOOKED_UP}" for tree in trees)]


def _check_installed() -> None:
    """Refuse to begin if a package for a later phase is missing."""
    missing = [name for name in ("hydra", "deepspeed") if find_spec(name) is None]
    if missing:
        raise UserError(f"training needs {' and '.join(missing)}: {INSTALL_TRAINING}")


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"the plan takes {gigabytes(needed)} of disk, and {folder} has {gigabytes(free)} free; make "
            "room, or give a smaller --budget or fewer --tokens"
        )


def _quoted(value: Any) -> str:
    """A value as Hydra's grammar reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(_quoted, value))}]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)


def _free_memory() -> None:
    """Free the memory of a phase: models, captured rounds and compiled layers."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
