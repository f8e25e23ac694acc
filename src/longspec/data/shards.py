"""A dataset on disk: packed sequences of tokens in memory-mapped shards.

FOLDER/dataset.json        written last: a folder without it is not finished
FOLDER/shard-00000/        gets this name when it is complete
    tokens.npy             [n, T] uint16 or uint32
    roles.npy              [n, T] uint8, a `Role` per token
    starts.npy             flat int32: where in its sequence each document starts, sequence by sequence
    firsts.npy             [n + 1] int64: where in `starts` each sequence's documents begin
    shard.json             where the text came from and under what licence
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspec.atomic import clear_unfinished, unfinished, write_whole
from longspec.errors import UserError, reason_of, shown
from longspec.records import read_record

FORMAT = 1
_INFO, _ORIGIN = "dataset.json", "shard.json"
# What a dataset has before its first shard: written by `prepare` or by `synthesize`.
_BEGUN = (_INFO, "prepare.json", "progress")
_MAX_OPEN = 48


class Role(IntEnum):
    """What a token is; a collator decides by it whether the token is learnt."""

    PAD = 0
    PROMPT = 1
    REASONING = 2
    TEXT = 3
    """An answer, or plain text."""


@dataclass(frozen=True)
class Packed:
    """One sequence of T tokens: documents, then padding, which is a document of its own."""

    tokens: NDArray[np.int64]
    roles: NDArray[np.uint8]
    starts: NDArray[np.int32]
    """Where each document starts; the first is 0."""


@dataclass(frozen=True)
class Source:
    """Where text came from."""

    name: str
    licence: str
    num_documents: int
    num_tokens: int


@dataclass(frozen=True)
class Origin:
    """What `shard.json` says."""

    sources: list[Source]
    num_sequences: int


@dataclass(frozen=True)
class DatasetInfo:
    """What `dataset.json` says."""

    seq_length: int
    vocab_size: int
    tokenizer: str | None
    """`tokenizer_fingerprint` of the tokenizer; None if the tokens were given as numbers."""
    num_shards: int
    num_sequences: int
    num_tokens: int
    """Without the padding."""
    sources: list[Source]
    made_by: dict[str, Any]
    """The settings that made it."""


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary: the same token ids give the same hash."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def shard_folder(folder: Path, index: int) -> Path:
    """The folder of a shard; it exists only when it is complete."""
    return folder / f"shard-{index:05d}"


def write_shard(
    folder: Path, index: int, sequences: Sequence[Packed], vocab_size: int, sources: Iterable[Source]
) -> None:
    """Write one shard; it appears complete or not at all."""
    goal = shard_folder(folder, index)
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    firsts = np.cumsum([0, *(len(one.starts) for one in sequences)])
    arrays = {
        "tokens": np.stack([one.tokens for one in sequences]).astype(dtype),
        "roles": np.stack([one.roles for one in sequences]).astype(np.uint8),
        "starts": np.concatenate([one.starts for one in sequences]).astype(np.int32),
        "firsts": firsts.astype(np.int64),
    }
    with unfinished(goal) as building:
        building.mkdir()
        for name, array in arrays.items():
            _save(building / f"{name}.npy", array)
        origin = Origin(list(sources), len(sequences))
        write_whole(building / _ORIGIN, json.dumps(asdict(origin), indent=1).encode())
        if goal.exists():
            shutil.rmtree(goal)


def finish(
    folder: Path, num_shards: int, vocab_size: int, tokenizer: str | None, made_by: dict[str, Any]
) -> DatasetInfo:
    """Complete the dataset: count its tokens, and write `counts.npy` and `dataset.json`."""
    counts = np.zeros(vocab_size, np.int64)
    sources: list[Source] = []
    num_sequences = seq_length = 0
    for index in range(num_shards):
        shard = shard_folder(folder, index)
        sources += read_record(shard / _ORIGIN, Origin).sources
        tokens, roles = (_load(shard / f"{name}.npy") for name in ("tokens", "roles"))
        if tokens.ndim != 2 or tokens.shape != roles.shape or tokens.max() >= vocab_size:
            raise UserError(f"{shard} is damaged: remove {folder} and begin again")
        num_sequences, seq_length = num_sequences + len(tokens), tokens.shape[1]
        counts += np.bincount(tokens[roles != Role.PAD], minlength=vocab_size)
    clear_unfinished(folder)
    _save(folder / "counts.npy", counts)
    info = DatasetInfo(
        seq_length,
        vocab_size,
        tokenizer,
        num_shards,
        num_sequences,
        int(counts.sum()),
        merged(sources),
        made_by,
    )
    write_whole(folder / _INFO, json.dumps({"format": FORMAT} | asdict(info), indent=1).encode())
    return info


def merged(sources: Iterable[Source]) -> list[Source]:
    """Each name and licence once, with the sum of documents and tokens."""
    found: dict[tuple[str, str], Source] = {}
    for one in sources:
        key = (one.name, one.licence)
        old = found.get(key, Source(*key, 0, 0))
        found[key] = Source(*key, old.num_documents + one.num_documents, old.num_tokens + one.num_tokens)
    return list(found.values())


def is_finished(folder: Path) -> bool:
    return (folder / _INFO).is_file()


class Dataset:
    """The sequences of a finished dataset, in memory-mapped files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.info = folder, read_info(folder)
        self._open: dict[int, tuple[Any, ...]] = {}
        sizes = []
        for index in range(self.info.num_shards):
            sizes.append(read_record(shard_folder(folder, index) / _ORIGIN, Origin).num_sequences)
        if min(sizes) < 0 or sum(sizes) != self.info.num_sequences:
            raise self.damaged(f"its shards do not have {self.info.num_sequences} sequences")
        self._ends = np.cumsum(sizes)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Packed:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = int(np.searchsorted(self._ends, index, side="right"))
        tokens, roles, starts, firsts = self._arrays(shard)
        row = index - (int(self._ends[shard - 1]) if shard else 0)
        documents = starts[firsts[row] : firsts[row + 1]]
        if tokens[row].max() >= self.info.vocab_size or roles[row].max() > max(Role):
            raise self.damaged(f"sequence {index} has a token or a role that there is not")
        return Packed(tokens[row].astype(np.int64), np.asarray(roles[row]), np.asarray(documents))

    def damaged(self, what: str) -> UserError:
        return UserError(f"the dataset {self.folder} is damaged: {what}; make it again")

    def shards(self) -> Iterator[tuple[Any, ...]]:
        """The arrays of each shard: tokens, roles, starts, firsts."""
        for shard in range(self.info.num_shards):
            yield self._arrays(shard)

    def _arrays(self, shard: int) -> tuple[Any, ...]:
        """The arrays of a shard. Only some shards stay open, because each mapped file needs a descriptor."""
        if shard not in self._open:
            if len(self._open) >= _MAX_OPEN:
                del self._open[next(iter(self._open))]
            place = shard_folder(self.folder, shard)
            names = ("tokens", "roles", "starts", "firsts")
            arrays = tuple(_load(place / f"{name}.npy") for name in names)
            num_sequences = int(self._ends[shard] - (self._ends[shard - 1] if shard else 0))
            if not _fit(arrays, num_sequences, self.info.seq_length):
                raise self.damaged(f"the arrays in {place.name} do not fit together")
            self._open[shard] = arrays
        return self._open[shard]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each token occurs, [V]."""
        counts = np.asarray(_load(self.folder / "counts.npy"))
        if counts.shape != (self.info.vocab_size,) or counts.dtype != np.int64:
            raise self.damaged("counts.npy does not count its tokens")
        return counts

    def check(self, vocab_size: int, tokenizer: str | None, target_name: str) -> None:
        """Refuse a dataset that another tokenizer made."""
        if self.info.vocab_size > vocab_size or (
            tokenizer is not None and self.info.tokenizer not in (None, tokenizer)
        ):
            raise UserError(
                f"the dataset {self.folder} was made with another tokenizer ({self.info.tokenizer}, "
                f"{self.info.vocab_size} tokens) than {target_name} has ({tokenizer}, {vocab_size}); "
                "run `longspec data prepare` again for this target"
            )


def read_info(folder: Path) -> DatasetInfo:
    if not is_finished(folder):
        raise _no_dataset(folder)
    if read_record(folder / _INFO, dict[str, Any]).get("format") != FORMAT:
        raise UserError(f"the dataset {folder} has another format; prepare it again with this version")
    info = read_record(folder / _INFO, DatasetInfo)
    for name in ("seq_length", "vocab_size", "num_shards", "num_sequences"):
        if not 1 <= getattr(info, name) < 2**40:
            raise UserError(f"cannot read {folder / _INFO}: {name} is {shown(getattr(info, name))}")
    return info


def _no_dataset(folder: Path) -> UserError:
    """What a folder is that has no finished dataset."""
    if not folder.exists():
        return UserError(f"the dataset {folder} does not exist")
    if not folder.is_dir():
        return UserError(f"{folder} is a file; a dataset is a folder")
    if any(folder.glob("shard-*")) or any((folder / name).exists() for name in _BEGUN):
        return UserError(f"the dataset {folder} is not finished: run its command again")
    return UserError(f"{folder} is not a dataset: it has no {_INFO}")


def _save(path: Path, array: NDArray[Any]) -> None:
    data = io.BytesIO()  # because numpy does not say why a file cannot be written
    np.save(data, array)
    write_whole(path, data.getvalue())


def _load(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises errors of many types for a damaged header
        raise UserError(f"cannot read {path}: {reason_of(error)}; prepare the dataset again") from error


def _fit(arrays: tuple[Any, ...], num_sequences: int, seq_length: int) -> bool:
    """Whether a shard's arrays have the types, shapes and bounds that belong together."""
    tokens, roles, starts, firsts = arrays
    shape, kinds = (num_sequences, seq_length), [array.dtype.name for array in arrays]
    if kinds not in (["uint16", "uint8", "int32", "int64"], ["uint32", "uint8", "int32", "int64"]):
        return False
    if (tokens.shape, roles.shape, firsts.shape, starts.ndim) != (shape, shape, (num_sequences + 1,), 1):
        return False
    if firsts[0] != 0 or firsts[-1] != len(starts) or (np.diff(firsts) < 1).any():
        return False
    follows = np.diff(starts) > 0
    follows[firsts[1:-1] - 1] = True  # where the next sequence begins
    return bool(follows.all() and (starts[firsts[:-1]] == 0).all() and starts.max() < seq_length)
