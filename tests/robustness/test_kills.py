"""`kill -9` at random moments of what writes: given again, a command ends as if nothing had happened.

A server process imports torch once and forks a process for each run, so that a moment falls into the work and
not into three seconds of imports. Half of the moments are points in time, half are accesses to the output's
files: there a kill can leave half of something.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.jobs import Job, make_jobs
from tests.train.tiny import no_launcher

PRELOADED = [
    *("torch", "transformers", "gguf", "deepspeed", "hydra", "matplotlib.pyplot", __name__),
    *("longspec.api", "longspec.data.synthesize", "longspec.train.trainer", "longspec.train.export"),
]
KILLS_EACH = 17  # of six jobs
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate")


def work(folder: Path, argv: list[str], environment: dict[str, str], kill_at: int | None, log: Path) -> None:
    """Run a command line in `folder`; killed by itself at so many accesses to files in there."""
    from longspec.cli.main import main

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    accesses, here = 0, str(folder)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal accesses
        if event not in CHANGES or not isinstance(arguments[0], str | os.PathLike):
            return
        if os.path.abspath(arguments[0]).startswith(here):
            accesses += 1
            if accesses == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    code = main(argv)
    sys.stdout.flush()
    log.with_suffix(".accesses").write_text(str(accesses))
    os._exit(code)


class Runs:
    """Runs a job's processes."""

    def __init__(self, logs: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._logs = logs

    def __call__(
        self, job: Job, folder: Path, seconds: float | None = None, kill_at: int | None = None
    ) -> bool:
        """Whether it came to its end before it was killed, after so many seconds or at that access."""
        if job.is_done(folder):
            return True
        folder.mkdir(exist_ok=True)
        log = self._logs / f"{folder.name}.log"
        environment = no_launcher() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | job.environment
        process = self._context.Process(target=work, args=(folder, job.argv, environment, kill_at, log))
        process.start()
        process.join(240 if seconds is None else seconds)
        if process.is_alive():
            assert seconds is not None, f"it hangs: {log.read_text()}"
            process.kill()
            process.join()
        assert process.exitcode in (0, -signal.SIGKILL), log.read_text()
        return process.exitcode == 0

    def num_accesses(self, folder: Path) -> int:
        return int((self._logs / f"{folder.name}.accesses").read_text())


@pytest.mark.full
def test_a_hundred_kills(tiny_folder: Path, tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, tiny_folder)
    rng, runs = random.Random(21), Runs(tmp_path)
    assert runs(jobs["training"], tmp_path / "trained")
    for name, job in jobs.items():
        unbroken, begun = tmp_path / f"{name}-unbroken", time.monotonic()
        assert runs(job, unbroken)
        seconds, num_accesses = time.monotonic() - begun, runs.num_accesses(unbroken)
        expected, left = job.contents(unbroken), KILLS_EACH
        while left:
            folder, moments = tmp_path / f"{name}-{left}", []
            while left:
                by_time, access = rng.uniform(0, seconds), rng.randint(1, num_accesses)
                moments.append(rng.choice(({"seconds": by_time}, {"kill_at": access})))
                if runs(job, folder, **moments[-1]):  # it was faster
                    break
                left -= 1
            assert runs(job, folder)
            found, where = job.contents(folder), f"{name}, killed at {moments}"
            assert found.keys() == expected.keys(), where
            for file, content in expected.items():
                assert found[file] == content, f"{where}: {file}"
            shutil.rmtree(folder)
