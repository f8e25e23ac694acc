"""Where our C code is compiled to, and what else may be found or happen there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longspec.native.build import library


@pytest.fixture
def quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a compiler that gives the library that is compiled already, because the real one takes 20
    seconds. It writes a line to `runs` each time."""
    compiled = library()
    if compiled is None:
        pytest.skip("no C compiler here")
    shutil.copy(compiled._name, tmp_path / "library")
    command = tmp_path / "cc"
    lines = (
        "#!/bin/sh",
        f"echo run >> {tmp_path}/runs",
        'while [ "$1" != -o ]; do shift; done',
        f'cp {tmp_path}/library "$2"',
    )
    command.write_text("\n".join(lines) + "\n")
    command.chmod(0o755)
    monkeypatch.setenv("CC", str(command))
    return tmp_path


def load() -> None:
    """In a new process, because one opens a library once."""
    lines = "from longspec.native import build\nassert build.library() is not None, build.what_is_missing()"
    subprocess.run([sys.executable, "-c", lines], check=True)


@pytest.mark.parametrize("content", [b"", b"\x7fELF but of another machine" * 20])
def test_a_damaged_file_is_compiled_again(
    content: bytes, quick_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", str(quick_compiler / "cache"))
    load()
    (file,) = (quick_compiler / "cache").rglob("*.so")
    whole = file.read_bytes()
    file.write_bytes(content)
    load()
    load()
    assert file.read_bytes() == whole
    assert len((quick_compiler / "runs").read_text().splitlines()) == 2


def test_a_cache_without_room_is_done_without(quick_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = quick_compiler / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        monkeypatch.setenv("LONGSPEC_CACHE", str(disk))
        load()
        assert not [path for path in disk.rglob("*") if path.is_file()]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
