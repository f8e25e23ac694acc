"""Files and folders that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from longspec.errors import UserError

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
            # Names the file; without this it is the temporary name, or none at all.
            raise OSError(error.errno, error.strerror, str(path)) from error
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


def is_empty(folder: Path) -> bool:
    """Whether a folder does not exist yet, or has only what killed processes left."""
    return not folder.exists() or all(one.name.startswith(_WRITING) for one in folder.iterdir())


def check_folder(folder: Path) -> None:
    """Refuse the path of a folder if a file is in its way."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            return
        if place.exists():
            raise UserError(f"{place} is a file; name a folder that is new or empty")


def check_file(path: Path) -> None:
    """Refuse the path of a file that cannot be written, before the work for it begins."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}; make it, or name another file than {path}")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write to {path.parent}; name another file than {path}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
