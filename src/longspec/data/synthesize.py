"""The target writes its own training data: without any dataset, or from prompts and documents."""

from __future__ import annotations

import gc
import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longspec import hub
from longspec.config import ModelConfig
from longspec.data.options import SynthesisOptions
from longspec.data.records import JsonLines
from longspec.data.samples import FILES, Script
from longspec.data.shards import is_finished
from longspec.data.synthesis import DatasetMaker, SynthesisSummary, begin, summary_of
from longspec.data.work import locked
from longspec.engine.engine import Engine
from longspec.engine.load import LoadPlan, load_models
from longspec.engine.make import make_engine
from longspec.engine.memory import kv_bytes
from longspec.errors import UserError
from longspec.models.files import eos_ids, matrix_types, read_config
from longspec.models.placement import check_fits, free_memory, pick_device, pick_dtype
from longspec.models.target import Transformer
from longspec.models.weights import Precision, pick_precision
from longspec.progress import token_bar
from longspec.prompts import PromptEncoder
from longspec.records import MOST_BYTES, read_bytes, read_record

# As many rows at once as fit into this share of the free memory, up to these numbers.
_MEMORY_SHARE = 0.7
_BATCH = {"cuda": 2048, "cpu": 32}
# Samples of a shard per row: enough that the time at its end, when few rows run, hardly matters.
_SAMPLES_PER_ROW = 16


class Writer:
    """Keeps target and engine from one dataset for the next, because loading and capturing take long."""

    def __init__(self) -> None:
        self._loaded: tuple[LoadPlan, torch.device, Transformer] | None = None
        self._engines: dict[tuple[int, int | None], Engine] = {}
        """At most one: the newest, by the length of its sequences and the rows that were asked for."""

    def engine(
        self, plan: LoadPlan, device: torch.device, seq_length: int, batch: int | None, progress: bool
    ) -> Engine:
        """An engine for `batch` sequences of `seq_length` at once; without a number, for as many as fit."""
        if self._loaded is None or self._loaded[:2] != (plan, device):
            self.forget()
            self._loaded = plan, device, load_models(plan, device, progress=progress).target
        if (seq_length, batch) not in self._engines:
            self._forget_engine()  # first, because its pages take most of the memory
            self._engines[seq_length, batch] = _make_engine(self._loaded[2], plan, seq_length, batch)
        return self._engines[seq_length, batch]

    def holds(self, target: str, device: torch.device) -> bool:
        """Whether the target with this name is loaded."""
        return self._loaded is not None and (self._loaded[0].name, self._loaded[1]) == (target, device)

    def forget(self) -> None:
        """Free the memory of target and engine."""
        self._loaded = None
        self._forget_engine()

    def _forget_engine(self) -> None:
        self._engines.clear()
        gc.collect()


def _make_engine(target: Transformer, plan: LoadPlan, seq_length: int, batch: int | None) -> Engine:
    config, dtype = plan.config, plan.precision.dtype
    batch = batch or _pick_batch(config, seq_length, target.device, dtype)
    # Pages for all rows, because the free memory of the moment must not decide what is written.
    pages = kv_bytes(config, dtype, batch, seq_length)
    return make_engine(target, max_length=seq_length, max_rows=batch, kv_memory=pages)


def synthesize(
    options: SynthesisOptions, progress: bool = False, writer: Writer | None = None
) -> SynthesisSummary:
    """Make the dataset, or continue where an earlier run stopped. A `writer` that is given to several calls
    loads their target once."""
    with locked(options.output):
        return _synthesize(options, progress, writer or Writer())


def _synthesize(options: SynthesisOptions, progress: bool, writer: Writer) -> SynthesisSummary:
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    files = {
        mode: JsonLines(path, check) for mode, check in FILES.items() if (path := getattr(options, mode))
    }
    topics = _read_topics(options.prefixes) if options.prefixes else ()
    settings = begin(options.output, _settings(options, device, dtype, files, topics))
    if is_finished(options.output):
        return summary_of(options.output)
    found, config, precision = _find(options, device, dtype, progress, writer.holds(options.target, device))
    encoder = PromptEncoder(found.folder, found.chat_template)
    eos = eos_ids(found.folder, found.eos_id)
    script = Script(options, encoder, files.get("prompts"), files.get("documents"), topics, eos)
    plan = LoadPlan(options.target, found.folder, config, precision)
    engine = writer.engine(plan, device, options.seq_length, settings["batch"], progress)
    batch = engine.device.max_rows
    shard_samples = options.shard_samples or _SAMPLES_PER_ROW * batch
    licence = options.licence or _licence(found.folder)
    settings |= {"batch": batch}
    with token_bar("Writing", options.tokens, progress) as update:
        return DatasetMaker(options, script, engine, shard_samples, licence, settings, update).make()


def _find(
    options: SynthesisOptions, device: torch.device, dtype: torch.dtype, progress: bool, is_loaded: bool
) -> tuple[hub.TargetFiles, ModelConfig, Precision]:
    """The target's files. A target that is not loaded and does not fit is refused before its weights are
    fetched."""
    find = partial(
        hub.resolve, options.target, revision=options.revision, offline=options.offline, progress=progress
    )
    shape = find(config_only=True)
    config = read_config(shape.folder, shape.config)
    if options.seq_length > config.max_length:
        raise UserError(
            f"seq_length is {options.seq_length}; the limit of {options.target} is {config.max_length}; "
            f"give --seq-length {config.max_length}"
        )
    precision = pick_precision("auto", dtype, device, matrix_types=matrix_types(shape, config))
    if not is_loaded:
        check_fits(options.target, config, precision, device)
    return find(), config, precision


def _settings(
    options: SynthesisOptions,
    device: torch.device,
    dtype: torch.dtype,
    files: dict[str, JsonLines],
    topics: tuple[str, ...],
) -> dict[str, Any]:
    """All that decides what is written, as JSON gives it back."""
    own = {"output", "offline", "seconds", "device", "dtype", "modes", "temperatures", "prefixes", *FILES}
    plain = [field.name for field in fields(SynthesisOptions) if field.name not in own]
    return {name: getattr(options, name) for name in plain} | {
        "modes": options.shares,
        "temperatures": list(options.temperatures),
        "prefixes": list(topics),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        **{name: f"{lines.path.name} {lines.fingerprint}" for name, lines in files.items()},
    }


def _read_topics(path: Path) -> tuple[str, ...]:
    data = read_bytes(path, MOST_BYTES)
    if len(data) > MOST_BYTES:
        raise UserError(f"{path} has more than {MOST_BYTES // 2**20} MiB; a line per topic needs less")
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    topics = tuple(line.strip() for line in lines if line.strip())
    if not topics:
        raise UserError(f"{path} is empty; each line must have the beginning of a question")
    return topics


def _pick_batch(config: ModelConfig, seq_length: int, device: torch.device, dtype: torch.dtype) -> int:
    """The largest power of two that fits into memory."""
    batch, room = _BATCH[device.type], _MEMORY_SHARE * free_memory(device)
    # Besides its pages, a row needs memory for its scores, several times while a token is chosen.
    while batch > 1 and kv_bytes(config, dtype, batch, seq_length) + 16 * batch * config.vocab_size > room:
        batch //= 2
    return batch


def _licence(folder: Path) -> str:
    if (folder / "longspec.json").is_file():
        licence = read_record(folder / "longspec.json", dict[str, Any]).get("license")
        if licence:
            return str(licence)
    card = folder / "README.md"
    if card.is_file():
        found = re.search(
            r"^license:\s*(\S+)", card.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
        )
        if found:
            return found[1]
    return "unknown"
