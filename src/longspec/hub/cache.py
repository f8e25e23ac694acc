"""The user's cache of converted models: folders that are either complete or not there.

A folder is built under a temporary name beside its place and renamed into it. The builder holds a
file lock on the temporary folder, which the kernel drops when the process dies however it dies, so
the next build can tell leftovers from work in progress.
"""

import contextlib
import enum
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.records import read_record

MANIFEST = "longspec.json"
FORMAT = 1  # raise it when a converter changes what it writes: older folders are then built anew
_TEMPORARY = ".building-"


@dataclass(frozen=True)
class Manifest:
    """What says that a folder is finished."""

    format: int
    files: dict[str, int]
    """Sizes by name."""


def cache_dir() -> Path:
    """Where converted models are kept: LONGSPEC_CACHE, else longspec/ in the XDG cache folder."""
    own, shared = os.environ.get("LONGSPEC_CACHE"), os.environ.get("XDG_CACHE_HOME")
    place = Path(own) if own else Path(shared or "~/.cache") / "longspec"
    try:
        return place.expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{place} names no home folder: set LONGSPEC_CACHE to a folder to keep models in"
        ) from error


def is_complete(folder: Path) -> bool:
    """Whether the folder was finished in today's format and every file still has its size."""
    try:
        manifest = read_record(folder / MANIFEST, Manifest)
        sizes = {name: (folder / name).stat().st_size for name in manifest.files}
        return manifest.format == FORMAT and sizes == manifest.files
    except (OSError, ValueError):  # not there, or damaged, or a name that cannot be one
        return False


def build_folder(folder: Path, fill: Callable[[Path], dict[str, Any]]) -> Path:
    """Return `folder`, made by `fill(temporary_folder)` first unless it is complete already.

    `fill` returns what the manifest should say about the origin. When another process finishes the
    same folder first, its work is used and ours is dropped.
    """
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        with _temporary_folder(folder.parent) as building:
            manifest = fill(building)
            _write_manifest(building, manifest)
            _sync(building)
            _move_into_place(building, folder)
    except OSError as error:
        raise _as_user_error(error, folder.parent) from error
    return folder


def require_space(folder: Path, num_bytes: int) -> None:
    """Refuse work that would fill the disk under `folder`, before it starts."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise UserError(
            f"not enough disk space in {folder.parent}: {num_bytes / 1e6:,.1f} MB needed, "
            f"{free / 1e6:,.1f} MB free; free some or set LONGSPEC_CACHE to a folder on a larger disk"
        )


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    text = json.dumps(manifest | {"format": FORMAT, "files": files}, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _sync(folder: Path) -> None:
    """Flush the folder's files and the folder itself, so that a power cut cannot leave holes in them."""
    for path in [*folder.iterdir(), folder]:
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_into_place(building: Path, folder: Path) -> None:
    while True:
        try:
            os.rename(building, folder)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if is_complete(folder):  # another process was faster; ours goes with the temporary folder
            return
        _discard(folder)  # damaged by hand: it was renamed in whole, so no builder is at work in it
    _sync_one(folder.parent)


def _discard(path: Path) -> None:
    """Remove a damaged folder in one visible step: under a temporary name first, then file by file."""
    doomed = _temporary_name(path.parent)
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return
    if doomed.is_dir():
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        doomed.unlink()


def _temporary_name(parent: Path) -> Path:
    return parent / f"{_TEMPORARY}{socket.gethostname()}-{secrets.token_hex(8)}"


@contextlib.contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """A locked temporary folder in `parent`, removed on the way out unless it was renamed."""
    folder, descriptor = _create_locked(parent)
    try:
        yield folder
    finally:
        # After a rename there is nothing left under this name.
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _create_locked(parent: Path) -> tuple[Path, int]:
    while True:
        folder = _temporary_name(parent)
        folder.mkdir()
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)
            # A sweeper may have come between mkdir and the lock: then this folder is lost, take another.
            if _lock(descriptor) is not _Lock.TAKEN and folder.exists():
                return folder, descriptor
            os.close(descriptor)


class _Lock(enum.Enum):
    OURS = enum.auto()
    TAKEN = enum.auto()
    UNSUPPORTED = enum.auto()


def _lock(descriptor: int) -> _Lock:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _Lock.TAKEN
    except OSError:
        return _Lock.UNSUPPORTED
    return _Lock.OURS


def _sweep(parent: Path) -> None:
    """Remove temporary folders whose builder is dead."""
    for leftover in parent.glob(_TEMPORARY + "*"):
        with contextlib.suppress(OSError):  # another sweeper may be at it too
            descriptor = os.open(leftover, os.O_RDONLY)
            try:
                if _lock(descriptor) is _Lock.OURS and _may_be_dead(leftover):
                    shutil.rmtree(leftover, ignore_errors=True)
            finally:
                os.close(descriptor)


def _may_be_dead(leftover: Path) -> bool:
    """Locks on network file systems may not reach other hosts: give builds made there a day."""
    on_this_host = leftover.name.startswith(f"{_TEMPORARY}{socket.gethostname()}-")
    return on_this_host or time.time() - leftover.stat().st_mtime > 86400


def _as_user_error(error: OSError, parent: Path) -> UserError:
    what = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        return UserError(f"no space left in {parent}: free some or set LONGSPEC_CACHE to a folder with room")
    where = error.filename or parent
    return UserError(f"cannot write {where}: {what}; set LONGSPEC_CACHE to a folder you can write")
