"""`longspec data prepare`: make a dataset from text files, in bounded memory, with any number of processes.

Workers tokenise chunks of records. This process packs the documents in the order of the input, so the result
does not depend on the workers. After each shard, `prepare.json` says where in the input to continue.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longspec.atomic import clear_unfinished, write_whole
from longspec.data.encode import Bad, Encoded, Encoder
from longspec.data.inputs import InputFile, find_files, fingerprint
from longspec.data.options import PrepareOptions
from longspec.data.pack import POLICIES, Shelf
from longspec.data.read import Chunk, Position, read_chunks
from longspec.data.shards import (
    DatasetInfo,
    Source,
    finish,
    is_finished,
    read_info,
    tokenizer_fingerprint,
    write_shard,
)
from longspec.data.work import claimed, encode_in_order
from longspec.errors import UserError, check_same, entry
from longspec.hub import resolve_tokenizer
from longspec.progress import count_bar
from longspec.prompts import PromptEncoder
from longspec.records import as_record, read_record

_STATE = "prepare.json"
_SHARD_TOKENS = 1 << 23
_WORKER_BYTES = 1 << 21  # input bytes per worker; to start one takes about as long as to process them
_NUM_PLACES = 5


@dataclass
class RecordCounts:
    """What became of the records; a finished dataset keeps it next to the settings."""

    num_documents: int = 0
    num_short: int = 0
    num_bad: int = 0
    bad_places: list[str] = field(default_factory=list)
    """The first few."""


@dataclass
class PrepareState:
    """The state of the work at the end of a shard."""

    settings: dict[str, Any]
    position: Position = field(default_factory=Position)
    num_shards: int = 0
    counts: RecordCounts = field(default_factory=RecordCounts)


@dataclass(frozen=True)
class PrepareSummary:
    """What was made."""

    folder: str
    sequences: int
    tokens: int
    documents: int
    shards: int
    padding_share: float
    short: int
    bad: int
    bad_places: list[str]
    sources: list[dict[str, Any]]
    seconds: float
    tokens_per_second: float
    """Of this run, without loading the tokenizer; 0 if there was nothing to do."""
    already: bool
    """Whether the dataset was finished before."""


def prepare(options: PrepareOptions, progress: bool = False) -> PrepareSummary:
    """Make the dataset, or finish one that was begun.

    With more than one worker, a script that calls this needs Python's `if __name__ == "__main__":` guard.
    """
    begun = time.monotonic()
    entry("packing", options.pack, POLICIES)
    files = find_files(options.inputs, options.split)
    target = resolve_tokenizer(
        options.target, revision=options.revision, offline=options.offline, progress=progress
    )
    tokenizer = PromptEncoder(target.folder, target.chat_template).tokenizer
    encoder = Encoder(options, tokenizer)
    settings = _settings(options, files, encoder)
    with claimed(options.folder, _STATE):
        clear_unfinished(options.folder)
        if is_finished(options.folder):
            info = read_info(options.folder)
            made_by = info.made_by
            check_same(options.folder, {name: made_by.get(name) for name in settings}, settings)
            (options.folder / _STATE).unlink(missing_ok=True)
            return _summary(options.folder, info, time.monotonic() - begun, None)
        job = _Job(options, encoder, _read_state(options.folder, settings))
        loaded = time.monotonic()
        chunks = read_chunks(files, job.state.position, options.skip, options.limit)
        total = sum(file.num_bytes for file in files)
        workers = min(options.workers, -(-total // _WORKER_BYTES))
        with count_bar("Preparing", total, progress, in_bytes=True) as advance:
            advance(sum(file.num_bytes for file in files[: job.state.position.file]))
            for chunk, outcomes in encode_in_order(encoder, chunks, workers):
                job.take(chunk, outcomes)
                advance(chunk.num_bytes)
        info = job.finish(Position(file=len(files)))
    now = time.monotonic()
    return _summary(options.folder, info, now - begun, job.num_tokens / (now - loaded))


class _Job:
    """The packing side: documents come in, shards go out."""

    def __init__(self, options: PrepareOptions, encoder: Encoder, state: PrepareState) -> None:
        self._options, self._encoder, self.state = options, encoder, state
        num_sequences = options.shard_sequences or max(1, _SHARD_TOKENS // options.seq_length)
        self._shelf = Shelf(POLICIES[options.pack], options.seq_length, num_sequences, encoder.pad_id)
        self._documents: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        self.num_tokens = 0
        """Packed in this run."""

    def take(self, chunk: Chunk, outcomes: list[Encoded | Bad]) -> None:
        for index, outcome in enumerate(outcomes):
            here = Position(chunk.index, outcome.number, 0, chunk.first_record + index)
            if isinstance(outcome, Bad):
                self._bad(outcome)
            elif len(outcome.document) < self._options.min_tokens:
                self.state.counts.num_short += 1
            else:
                self._put(outcome, here)

    def _bad(self, bad: Bad) -> None:
        if not self._options.skip_bad:
            way_out = "fix it, or leave refused records out with --skip-bad"
            raise UserError(f"{bad.place}: {bad.reason}; {way_out}")
        counts = self.state.counts
        counts.num_bad += 1
        if len(counts.bad_places) < _NUM_PLACES:
            counts.bad_places.append(f"{bad.place}: {bad.reason}")

    def _put(self, encoded: Encoded, here: Position) -> None:
        """Pack a document, or the rest that did not fit into the last shard."""
        start, origin = self.state.position, (encoded.source, encoded.licence)
        document = (
            encoded.document[: self._options.seq_length] if self._options.truncate else encoded.document
        )
        is_rest = (here.file, here.number) == (start.file, start.number) and start.offset > 0
        done = start.offset if is_rest else 0
        if not is_rest:
            self.state.counts.num_documents += 1
            self._documents[origin] += 1
        while done < len(document):
            taken = self._shelf.put(document[done:])
            done += taken
            self.num_tokens += taken
            self._tokens[origin] += taken
            if self._shelf.is_full:
                whole = done == len(document)
                self._write(
                    Position(here.file, here.number + 1, 0, here.records + 1)
                    if whole
                    else Position(here.file, here.number, done, here.records)
                )

    def _write(self, position: Position) -> None:
        """Write the full shard; work resumes from `position`."""
        origins = [*self._documents.keys() | self._tokens.keys()]
        sources = [Source(*one, self._documents[one], self._tokens[one]) for one in sorted(origins)]
        folder, state = self._options.folder, self.state
        write_shard(folder, state.num_shards, self._shelf.take(), self._encoder.vocab_size, sources)
        self._documents.clear()
        self._tokens.clear()
        state.num_shards, state.position = state.num_shards + 1, position
        _write_state(folder, state)

    def finish(self, end: Position) -> DatasetInfo:
        options, state = self._options, self.state
        if self._tokens:
            self._write(end)
        if not state.num_shards:
            where, counts = ", ".join(options.inputs), state.counts
            first = f", first {counts.bad_places[0]}" if counts.bad_places else ""
            raise UserError(
                f"no usable document in {where}: {counts.num_bad} bad{first}; "
                f"{counts.num_short} shorter than --min-tokens {options.min_tokens}"
            )
        made_by = state.settings | asdict(state.counts)
        tokenizer = tokenizer_fingerprint(self._encoder.tokenizer)
        info = finish(options.folder, state.num_shards, self._encoder.vocab_size, tokenizer, made_by)
        (options.folder / _STATE).unlink(missing_ok=True)
        return info


def _settings(options: PrepareOptions, files: list[InputFile], encoder: Encoder) -> dict[str, Any]:
    """All that the result depends on, as JSON gives it back."""
    skipped = ("folder", "offline", "skip_bad", "workers")
    own = {name: value for name, value in asdict(options).items() if name not in skipped}
    own |= {"inputs": list(dict.fromkeys(file.source for file in files))}
    more = {"input_files": fingerprint(files), "tokenizer": encoder.fingerprint}
    made: dict[str, Any] = json.loads(json.dumps({"command": "data prepare"} | own | more))
    return made


def _read_state(folder: Path, settings: dict[str, Any]) -> PrepareState:
    path = folder / _STATE
    if not path.is_file():
        if any(folder.iterdir()):
            raise UserError(f"the folder {folder} is not empty: name another with --output")
        state = PrepareState(settings)
        _write_state(folder, state)
        return state
    state = read_record(path, PrepareState)
    check_same(folder, state.settings, settings)
    return state


def _write_state(folder: Path, state: PrepareState) -> None:
    write_whole(folder / _STATE, json.dumps(asdict(state), indent=1).encode())


def _summary(folder: Path, info: DatasetInfo, seconds: float, rate: float | None) -> PrepareSummary:
    counts = as_record(info.made_by, RecordCounts, folder)
    return PrepareSummary(
        str(folder),
        info.num_sequences,
        info.num_tokens,
        counts.num_documents,
        info.num_shards,
        1 - info.num_tokens / (info.num_sequences * info.seq_length),
        counts.num_short,
        counts.num_bad,
        counts.bad_places,
        [asdict(source) for source in info.sources],
        seconds,
        rate or 0.0,
        already=rate is None,
    )
