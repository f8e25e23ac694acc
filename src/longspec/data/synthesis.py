"""Shards of samples that the target writes: resumable, deterministic.

A shard is a run of samples. An engine with an empty cache writes it, and its schedule depends only on the
samples, so a shard that is made again is the same. Until all is done, FOLDER/progress holds the settings and,
for each shard, what the next one must know.
"""

from __future__ import annotations

import io
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from longspec.atomic import write_whole
from longspec.data.options import MODES, SynthesisOptions
from longspec.data.pack import Document, pack_whole
from longspec.data.samples import AT_ONCE, Sample, Script
from longspec.data.screen import SeenTexts
from longspec.data.shards import (
    Source,
    finish,
    is_finished,
    read_info,
    shard_folder,
    tokenizer_fingerprint,
    write_shard,
)
from longspec.engine.engine import Engine
from longspec.engine.sequence import Sequence
from longspec.errors import UserError, check_same, reason_of
from longspec.records import as_record, parse_record, read_record

T = TypeVar("T")
_PROGRESS = "progress"
# Rounds that a GPU runs before the host looks at the rows; a CPU would only wait for rows that have ended.
_AHEAD = 8
# A shard of fewer samples would take longer to start than to write.
_LEAST_SAMPLES = 16
# Tokens per sample, before any is known.
_FIRST_GUESS = 256
_MARGIN = 1.02
# Counts that are not of samples that were kept or dropped.
_CUTS = ("loops cut", "questions cut", "tokens written", "tokens lost")


@dataclass
class SynthesisState:
    """The state between two shards."""

    num_shards: int = 0
    next_sample: int = 0
    num_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Samples kept, and dropped by reason; and what `_CUTS` names."""
    seen: SeenTexts = field(default_factory=SeenTexts)


@dataclass(frozen=True)
class ShardNote:
    """The part of the state that is written after a shard."""

    next_sample: int
    num_tokens: int
    counts: dict[str, int]


@dataclass(frozen=True)
class MadeBy:
    """How a finished dataset was made."""

    settings: dict[str, Any]
    counts: dict[str, int]


@dataclass(frozen=True)
class SynthesisSummary:
    """The figures of a dataset; speed and seconds are of this run only."""

    folder: str
    num_tokens: int
    num_sequences: int
    num_samples: int
    kept: int
    loops_cut: int
    questions_cut: int
    dropped: dict[str, int]
    lost_share: float
    """Of all tokens that the target wrote, those of samples that were dropped and those that were cut off."""
    tokens_written: int
    """Written by the target in this run, kept or not."""
    seconds: float
    tokens_per_second: float


OnTokens = Callable[[int, float], None]
"""Called with the tokens of the dataset, unfinished ones included, and with the tokens per second."""


def begin(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Check that an existing folder was begun with these settings; returns them.

    A batch of None means the batch that it was begun with.
    """
    path = folder / _PROGRESS / "settings.json"
    if is_finished(folder):
        known: dict[str, Any] | None = as_record(read_info(folder).made_by, MadeBy, folder).settings
    else:
        known = read_record(path, dict[str, Any]) if path.is_file() else None
    if known is None and folder.exists() and any(found.name != _PROGRESS for found in folder.iterdir()):
        raise UserError(f"{folder} is not empty; give an --output that is new or empty")
    if known is None:
        return settings
    if settings["batch"] is None:
        settings |= {"batch": known.get("batch")}
    check_same(folder, known, settings)
    if is_finished(folder):  # and was killed while it tidied up
        shutil.rmtree(folder / _PROGRESS, ignore_errors=True)
    return settings


def summary_of(folder: Path, tokens_written: int = 0, seconds: float = 0.0) -> SynthesisSummary:
    info = read_info(folder)
    counts = dict(as_record(info.made_by, MadeBy, folder).counts)
    kept = counts.pop("kept", 0)
    loops, questions, written, lost = (counts.pop(name, 0) for name in _CUTS)
    return SynthesisSummary(
        folder=str(folder),
        num_tokens=info.num_tokens,
        num_sequences=info.num_sequences,
        num_samples=kept + sum(counts.values()),
        kept=kept,
        loops_cut=loops,
        questions_cut=questions,
        dropped=counts,
        lost_share=round(lost / written, 4) if written else 0.0,
        tokens_written=tokens_written,
        seconds=round(seconds, 2),
        tokens_per_second=round(tokens_written / seconds, 1) if seconds else 0.0,
    )


class DatasetMaker:
    """Lets the target write samples, shard by shard."""

    def __init__(
        self,
        options: SynthesisOptions,
        script: Script,
        engine: Engine,
        shard_samples: int,
        licence: str,
        settings: dict[str, Any],
        on_tokens: OnTokens,
    ) -> None:
        """`settings` are all that decides what is written; a folder is continued only with equal ones."""
        self._options, self._script, self._engine = options, script, engine
        self._shard_samples, self._licence, self._settings = shard_samples, licence, settings
        self._vocab_size = engine.models.target.config.vocab_size
        self._on_tokens, self._started = on_tokens, time.perf_counter()
        self._num_written = 0
        self._state = SynthesisState()
        self._remembered: list[NDArray[np.uint64]] = []
        """Keys of the texts of this shard."""

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._started

    def make(self) -> SynthesisSummary:
        """Write the shards that are missing, then the files that complete the dataset."""
        folder, state, settings = self._options.output, self._state, self._settings
        (folder / _PROGRESS).mkdir(parents=True, exist_ok=True)
        write_whole(folder / _PROGRESS / "settings.json", json.dumps(settings, indent=1).encode())
        _recall(folder, state)
        limit = self._options.seconds
        while state.num_tokens < self._options.tokens:
            if limit is not None and state.num_shards and self._seconds >= limit:
                break
            self._make_shard()
        made_by = {"command": "data synthesize", "settings": settings, "counts": dict(state.counts)}
        tokenizer = tokenizer_fingerprint(self._script.tokenizer)
        finish(folder, state.num_shards, self._vocab_size, tokenizer, made_by)
        shutil.rmtree(folder / _PROGRESS)
        return summary_of(folder, self._num_written, self._seconds)

    def _make_shard(self) -> None:
        """Write the next samples, drop bad ones, and save the rest."""
        options, state = self._options, self._state
        each = state.num_tokens / state.next_sample if state.num_tokens else _FIRST_GUESS
        wanted = int(_MARGIN * (options.tokens - state.num_tokens) / each) + 1
        number = min(max(wanted, _LEAST_SAMPLES), self._shard_samples)
        samples = self._script.samples(state.next_sample, number)
        self._remembered = []
        self._engine.forget()
        self._write(samples)
        for sample in samples:
            if sample.dropped is None and not all(map(self._is_new, sample.answers)):
                sample.dropped = "near-duplicate"
        kept = [sample for sample in samples if sample.dropped is None]
        counts = _counts(samples, kept)
        if not kept:
            reasons = [f"{number} {why}" for why, number in counts.items() if number and why not in _CUTS]
            raise UserError(
                f"none of {len(samples)} samples could be kept ({', '.join(reasons)}); "
                "give more prompts or documents, higher temperatures or another target"
            )
        state.next_sample += number
        state.num_tokens += sum(len(sample.tokens) for sample in kept)
        state.counts += counts
        # The state is written before the shard, so that every shard has the state of the next one.
        _note(options.output, state, self._remembered)
        documents = [
            Document(np.array(sample.tokens, np.uint32), np.array(sample.roles, np.uint8)) for sample in kept
        ]
        packed = pack_whole(documents, options.seq_length, self._script.tokenizer.pad_token_id or 0)
        write_shard(options.output, state.num_shards, packed, self._vocab_size, self._sources(kept))
        state.num_shards += 1

    def _write(self, samples: list[Sample]) -> None:
        """Let the target write the samples in waves: questions and first turns, then later turns."""
        total = self._state.num_tokens

        def take(sequences: list[Sequence]) -> None:
            nonlocal total
            written = [(asked[one], one.tokens, one.finish_reason == "eos") for one in sequences]
            self._script.take(written)
            total += sum(len(sample.tokens) for sample, _, _ in written if sample.finished)
            self._num_written += sum(len(tokens) for _, tokens, _ in written)
            self._on_tokens(total, self._num_written / self._seconds)

        pending = [sample for sample in samples if sample.dropped is None]
        while pending:
            order = sorted(pending, key=lambda sample: (MODES.index(sample.mode), sample.index))
            asked = {self._script.sequence(sample): sample for sample in order}
            ahead, at_once = (_AHEAD, AT_ONCE) if self._engine.models.fused else (1, 1)
            written = self._engine.run_each(asked, ahead)
            # In a thread, so that template and tokenizer run while the engine continues.
            with ThreadPoolExecutor(1) as taker:
                taken = [taker.submit(take, few) for few in _in_lists(written, at_once)]
            for one in taken:
                one.result()
            for sample in pending:
                if sample.question is not None and not self._is_new(sample.question):
                    sample.dropped = "near-duplicate"
                sample.question = None
            pending = [sample for sample in pending if sample.dropped is None and not sample.finished]

    def _is_new(self, keys: NDArray[np.uint64]) -> bool:
        """Whether no earlier text is similar; if so, the text is remembered."""
        if new := self._state.seen.add(keys):
            self._remembered.append(keys)
        return new

    def _sources(self, kept: list[Sample]) -> list[Source]:
        sizes: dict[str, list[int]] = {}
        for sample in kept:
            sizes.setdefault(sample.mode, []).append(len(sample.tokens))
        name = f"written by {self._options.target}"
        return [
            Source(f"{name} ({mode})", self._licence, len(sizes[mode]), sum(sizes[mode]))
            for mode in sorted(sizes)
        ]


def _counts(samples: list[Sample], kept: list[Sample]) -> Counter[str]:
    counts = Counter("kept" if sample.dropped is None else sample.dropped for sample in samples)
    counts["loops cut"] = sum(sample.was_cut for sample in kept)
    counts["questions cut"] = sum(sample.question_was_cut for sample in kept)
    counts["tokens written"] = sum(sample.num_written for sample in samples)
    counts["tokens lost"] = sum(sample.num_lost for sample in kept)
    counts["tokens lost"] += sum(sample.num_written for sample in samples if sample.dropped is not None)
    return counts


def _in_lists(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """The values in order, `size` at a time."""
    left = iter(values)
    while few := list(islice(left, size)):
        yield few


def _note(folder: Path, state: SynthesisState, remembered: list[NDArray[np.uint64]]) -> None:
    """Write the state after a shard, before the shard itself appears."""
    facts = ShardNote(state.next_sample, state.num_tokens, dict(state.counts))
    keys = np.concatenate(remembered) if remembered else np.zeros(0, np.uint64)
    file = io.BytesIO()
    np.savez(file, keys=keys, facts=np.frombuffer(json.dumps(asdict(facts)).encode(), np.uint8))
    write_whole(_note_path(folder, state.num_shards), file.getvalue())


def _recall(folder: Path, state: SynthesisState) -> None:
    for index in count():
        if not shard_folder(folder, index).exists():
            return
        path = _note_path(folder, index)
        try:
            with np.load(path) as note:
                facts = parse_record(note["facts"].tobytes(), ShardNote, path)
                state.seen.remember(note["keys"].astype(np.uint64, casting="safe").ravel().tolist())
        except Exception as error:  # numpy raises errors of many types for a damaged archive
            raise UserError(
                f"cannot read {path}: {reason_of(error)}; remove {folder} and begin again"
            ) from error
        state.num_shards = index + 1
        state.next_sample, state.num_tokens = facts.next_sample, facts.num_tokens
        state.counts = Counter(facts.counts)


def _note_path(folder: Path, index: int) -> Path:
    return folder / _PROGRESS / f"{shard_folder(folder, index).name}.npz"
