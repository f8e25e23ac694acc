import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from longspec.errors import UserError
from longspec.hub.cache import build_folder, cache_dir, is_complete, require_space
from longspec.hub.gguf_convert import converted
from tests.hub.gguf_samples import write_gguf


def fill(folder: Path) -> dict[str, Any]:
    (folder / "weights").write_text("w" * 1000)
    return {"source": "test"}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_cache_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("LONGSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "longspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "longspec"


def test_built_once_and_rebuilt_when_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "parent" / "model"
    assert build_folder(folder, fill) == folder
    assert is_complete(folder)

    def unexpected(building: Path) -> dict[str, Any]:
        raise AssertionError("built twice")

    build_folder(folder, unexpected)
    (folder / "weights").write_text("short")
    assert not is_complete(folder)
    build_folder(folder, fill)
    assert is_complete(folder)
    assert names_in(folder.parent) == [".lock", "model"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, UserError])
def test_nothing_stays_after_an_error(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(building: Path) -> dict[str, Any]:
        fill(building)
        raise error("stop")

    with pytest.raises(error):
        build_folder(tmp_path / "model", fail)
    assert names_in(tmp_path) == [".lock"]


def test_disk_full_and_unwritable_cache(tmp_path: Path) -> None:
    def full(building: Path) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"no space left.*LONGSPEC_CACHE"):
        build_folder(tmp_path / "model", full)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="LONGSPEC_CACHE"):
        build_folder(tmp_path / "file" / "model", fill)
    with pytest.raises(UserError, match="not enough disk space"):
        require_space(tmp_path, 1 << 60)


def build_at_once(folder: Path, barrier: Barrier) -> None:
    def slow(building: Path) -> dict[str, Any]:
        time.sleep(0.2)
        (folder.parent / "built").open("a").write("once\n")
        return fill(building)

    barrier.wait(20)
    build_folder(folder, slow)
    assert is_complete(folder)


def test_of_two_processes_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    processes = [context.Process(target=build_at_once, args=(tmp_path / "model", barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "built").read_text() == "once\n"
    assert names_in(tmp_path) == [".lock", "built", "model"]


# Stops in the middle of a real conversion: after the first weights are written.
STUCK = """
    import sys, time
    from pathlib import Path
    from longspec.hub import gguf_convert
    gguf_convert._SHARD_BYTES = 100_000
    save = gguf_convert._save_file
    def stuck(*arguments):
        save(*arguments)
        print("writing", flush=True)
        time.sleep(60)
    gguf_convert._save_file = stuck
    gguf_convert.converted(Path(sys.argv[1]))
"""


def test_kill_9_in_a_conversion_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path / "cache"))
    gguf_path = tmp_path / "m.gguf"
    write_gguf(gguf_path)
    command = [sys.executable, "-c", textwrap.dedent(STUCK), str(gguf_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        parent = tmp_path / "cache" / "gguf"
        (leftover,) = parent.glob(".building-*")
        assert list(leftover.glob("*.safetensors"))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not is_complete(leftover)
    # The next build of any model takes the leftovers away.
    os.utime(gguf_path)
    folder = converted(gguf_path)
    assert names_in(parent) == [".lock", folder.name]
