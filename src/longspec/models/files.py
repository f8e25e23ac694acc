"""The small files beside a model's weights."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longspec.config import ModelConfig
from longspec.errors import UserError, naming, shown, whole_number
from longspec.models.families import config_from_hf
from longspec.records import read_record

# How the name of a file or folder begins that is being written.
_WRITING = ".writing-"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: if anything goes wrong, the old file stays."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_WRITING)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # not the temporary name, or none at all
        raise


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Where to write a large file or a folder: it becomes `path` when it is complete, or is removed."""
    temporary = path.with_name(f"{_WRITING}{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove(temporary)  # left by a process that was killed
    try:
        yield temporary
        temporary.replace(path)
    finally:
        _remove(temporary)


def clear_unfinished(folder: Path) -> None:
    """Remove what processes left that were killed while they wrote something in this folder."""
    for leftover in folder.glob(f"{_WRITING}*"):
        _remove(leftover)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def read_config(folder: Path, values: Mapping[str, Any] | None = None) -> ModelConfig:
    """The shape of the model in a Hugging Face folder, or of `values`, the content of its config.json."""
    if values is None:
        folder /= "config.json"
        values = read_record(folder, dict[str, Any])
    with naming(folder):
        return config_from_hf(values)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The model's own settings for generation; empty if it has none."""
    path = folder / "generation_config.json"
    return read_record(path, dict[str, Any]) if path.is_file() else {}


def eos_ids(folder: Path, *more: int | None) -> frozenset[int]:
    """Every token id that ends an answer: from the model's files, and `more`, where they are known."""
    found = {one for one in more if one is not None}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = read_record(path, dict[str, Any]).get("eos_token_id") if path.is_file() else None
        for one in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            with naming(path):
                found.add(whole_number("eos_token_id", one))
                if not abs(one) < 2**31:
                    raise UserError(f"eos_token_id is {shown(one)}, which is not a token id")
    return frozenset(found)
