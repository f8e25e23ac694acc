"""A disk that is really full: the message names a file on it, and nothing half-written stays."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from longspec.atomic import write_whole
from longspec.native.build import library
from tests.cli.run import exit_code
from tests.robustness.jobs import Job, make_jobs

SIZE = 8 * 2**20
QUICK, SLOW = ("conversion", "bench", "export"), ("preparation", "synthesis", "training")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def jobs(home: Path, tiny_folder: Path) -> dict[str, Job]:
    return make_jobs(home, tiny_folder)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)])
def test_it_is_named_and_nothing_half_written_stays(
    home: Path,
    jobs: dict[str, Job],
    name: str,
    disk: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library()  # now: once loaded from the small disk, it would keep its space there
    job, work, filler = jobs[name], disk / "work", disk / "filler"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for variable, value in job.environment.items():
        monkeypatch.setenv(variable, value)
    if name == "export" and not (home / "trained").exists():
        (home / "trained").mkdir()
        monkeypatch.chdir(home / "trained")
        assert exit_code(jobs["training"].argv) == 0
    work.mkdir()
    monkeypatch.chdir(work)
    assert exit_code(job.argv) == 0, capfd.readouterr().err
    expected = job.contents(work)
    needed = shutil.disk_usage(disk).used
    refused = 0
    for share in (0.0, 0.02, 0.3, 0.6, 0.9):
        monkeypatch.chdir(disk)
        shutil.rmtree(work)
        work.mkdir()
        monkeypatch.chdir(work)
        filler.write_bytes(bytes(SIZE - 4096 * int(share * needed / 4096)))
        capfd.readouterr()
        code = exit_code(job.argv)
        lines = capfd.readouterr().err.splitlines()
        if code != 0:
            refused += 1
            assert code == 2, lines
            assert lines[-1].startswith("longspec: error: "), lines
            assert "No space left on device" in lines[-1] or "disk" in lines[-1], lines
            assert job.output in lines[-1], lines
            left = [path for path in work.rglob(".*") if path.name != ".lock"]  # a lock is empty and stays
            assert not left, lines
        filler.unlink()
        if not job.is_done(work):
            assert exit_code(job.argv) == 0, capfd.readouterr().err
        found = job.contents(work)
        assert found.keys() == expected.keys()
        for file, content in expected.items():
            assert found[file] == content, file
    assert refused > 2


def test_an_error_names_the_file_alone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as found:
        write_whole(tmp_path / "none" / "x.json", b"")
    assert str(found.value) == f"[Errno 2] No such file or directory: '{tmp_path}/none/x.json'"
