"""The user's cache of converted models: folders that are either complete or not there.

A folder is built under a temporary name next to its place, then renamed. Only one process builds at a time:
it holds a file lock, which the kernel drops when the process ends, even by kill -9. So whoever holds the lock
may remove what earlier builds left.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.records import read_record

MANIFEST = "longspec.json"
FORMAT = 1  # raise it when a converter changes what it writes, so that older folders are built again
_LOCK, _TEMPORARY = ".lock", ".building-"


@dataclass(frozen=True)
class Manifest:
    """Shows that a folder is complete."""

    format: int
    files: dict[str, int]
    """Sizes by name."""


def cache_dir() -> Path:
    """The folder of converted models: LONGSPEC_CACHE, or longspec/ in the XDG cache folder."""
    own, shared = os.environ.get("LONGSPEC_CACHE"), os.environ.get("XDG_CACHE_HOME")
    place = Path(own) if own else Path(shared or "~/.cache") / "longspec"
    try:
        return place.expanduser()
    except RuntimeError as error:
        raise UserError(f"{place} names no home folder: set LONGSPEC_CACHE to a folder for models") from error


def is_complete(folder: Path) -> bool:
    """Whether the folder was finished in this version's format and every file still has its size."""
    try:
        manifest = read_record(folder / MANIFEST, Manifest)
        sizes = {name: (folder / name).stat().st_size for name in manifest.files}
        return manifest.format == FORMAT and sizes == manifest.files
    except (OSError, ValueError):  # missing, damaged, or an impossible name
        return False


def build_folder(folder: Path, fill: Callable[[Path], dict[str, Any]]) -> Path:
    """Return `folder`; if it is not complete, `fill(temporary_folder)` makes it first.

    `fill` returns what the manifest says about the origin. If another process builds in the same parent
    folder, this one waits and then uses what the other has made.
    """
    from filelock import FileLock

    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / _LOCK):
            for leftover in folder.parent.glob(_TEMPORARY + "*"):
                shutil.rmtree(leftover, ignore_errors=True)
            if not is_complete(folder):
                _build(folder, fill)
    except OSError as error:
        raise _as_user_error(error, folder.parent) from error
    return folder


def _build(folder: Path, fill: Callable[[Path], dict[str, Any]]) -> None:
    building = folder.with_name(_TEMPORARY + folder.name)
    building.mkdir()
    try:
        _write_manifest(building, fill(building))
        # A power cut must not leave holes in the files.
        for path in (*building.iterdir(), building):
            _sync(path)
        if folder.is_dir():  # damaged by hand
            shutil.rmtree(folder)
        building.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _as_user_error(error: OSError, parent: Path) -> UserError:
    what = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        return UserError(f"no space left in {parent}: free some or set LONGSPEC_CACHE to a folder with room")
    where = error.filename or parent
    return UserError(f"cannot write {where}: {what}; set LONGSPEC_CACHE to a folder you can write")
