"""Find the user's input files: JSONL, parquet, folders of them, and folders that `save_to_disk` wrote."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from longspec.errors import UserError
from longspec.records import read_record

_LINES = (".jsonl", ".ndjson", ".json")
_PACKED = (".gz", ".xz", ".zst")
_KNOWN = f"{', '.join(_LINES)} (plain or {', '.join(_PACKED)}), .parquet"
_END_BYTES = 4096


@dataclass(frozen=True)
class SavedSplits:
    """`dataset_dict.json` of `save_to_disk`."""

    splits: list[str]


@dataclass(frozen=True)
class SavedFile:
    """One Arrow file of a saved dataset."""

    filename: str


@dataclass(frozen=True)
class SavedState:
    """`state.json` of `save_to_disk`."""

    data_files: Annotated[list[SavedFile], Field(alias="_data_files", min_length=1)]


@dataclass(frozen=True)
class InputFile:
    """One file with records."""

    path: Path
    kind: str
    """`lines`, `parquet` or `arrow`."""
    source: str
    """The name of the input that the file belongs to."""
    num_bytes: int

    @property
    def label(self) -> str:
        return str(self.path)

    def place(self, number: int) -> str:
        """A record's name in messages."""
        return f"{self.label} {'line' if self.kind == 'lines' else 'row'} {number}"


def find_files(inputs: Sequence[str], split: str | None = None) -> list[InputFile]:
    """The files of all inputs, in the given order; those of a folder by name."""
    files = [
        InputFile(path, kind, _name(given), path.stat().st_size)
        for given in inputs
        for path, kind in _expand(Path(os.path.expanduser(given)), split)
    ]
    seen: set[Path] = set()
    for file in files:
        if not os.access(file.path, os.R_OK):
            raise UserError(f"cannot read {file.path}: check its permissions")
        if (real := file.path.resolve()) in seen:
            raise UserError(f"the input {file.path} is given twice")
        seen.add(real)
    return files


def fingerprint(files: Sequence[InputFile]) -> dict[str, Any]:
    """The number of files, their size, and a hash of their names, sizes, beginnings and ends."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.source}/{file.path.name} {file.num_bytes}\n".encode(errors="surrogateescape"))
        with open(file.path, "rb") as content:
            digest.update(content.read(_END_BYTES))
            content.seek(max(0, file.num_bytes - _END_BYTES))
            digest.update(content.read(_END_BYTES))
    total = sum(file.num_bytes for file in files)
    return {"files": len(files), "bytes": total, "sha256": digest.hexdigest()[:16]}


def _name(given: str) -> str:
    return Path(os.path.abspath(os.path.expanduser(given))).name


def _expand(path: Path, split: str | None) -> Iterator[tuple[Path, str]]:
    if not path.exists():
        raise UserError(f"there is no file or folder {path}")
    if path.is_dir():
        is_saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
        yield from _saved(path, split) if is_saved else _folder(path)
        return
    kind = _kind(path)
    if kind is None:
        raise UserError(f"{path} has an unknown format; known are {_KNOWN}, and folders of them")
    yield path, kind


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    if name.endswith(_LINES):
        return "lines"
    return "parquet" if path.suffix.lower() == ".parquet" else None


def _folder(folder: Path) -> Iterator[tuple[Path, str]]:
    """All input files in a folder and below it. Not hidden files, and not .json, which is rarely lines."""
    found = False
    for path in sorted(folder.rglob("*")):
        kind = _kind(path)
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if kind is not None and path.suffix != ".json" and path.is_file() and not hidden:
            found = True
            yield path, kind
    if not found:
        raise UserError(f"the folder {folder} has no input: {_KNOWN}, or what `save_to_disk` wrote")


def _saved(folder: Path, split: str | None) -> Iterator[tuple[Path, str]]:
    """The Arrow files of a dataset that `save_to_disk` wrote, in its order."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_record(folder / "dataset_dict.json", SavedSplits).splits
        if split is None and len(splits) == 1:
            split = splits[0]
        if split not in splits:
            asked = "name one with --split" if split is None else f"there is no split {split!r}"
            raise UserError(f"{folder} has the splits {', '.join(map(str, splits))}: {asked}")
        folder = folder / str(split)
    for file in read_record(folder / "state.json", SavedState).data_files:
        if "\0" in file.filename or not (folder / file.filename).is_file():
            raise UserError(f"{folder} has no file {file.filename}: save the dataset again")
        yield folder / file.filename, "arrow"
