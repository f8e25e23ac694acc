"""Files and folders that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
