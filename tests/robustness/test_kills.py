"""`kill -9` at random moments of what writes: given again, a command ends as if nothing had happened.

A server process imports torch once and forks a process for each run, so that a moment falls into the work and
not into three seconds of imports. Half of the moments are points in time, half are accesses to the output's
files: there a kill can leave half of something.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.bench.test_runs import TIMES
from tests.hub.gguf_samples import write_gguf
from tests.train.tiny import BASE, make_dataset, make_target, no_launcher

PRELOADED = [
    *("torch", "transformers", "gguf", "deepspeed", "hydra", "matplotlib.pyplot", __name__),
    *("longspec.api", "longspec.data.synthesize", "longspec.train.trainer", "longspec.train.export"),
]
KILLS = 100
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


Contents = dict[str, Any]


def plain_contents(folder: Path) -> Contents:
    """Every file of a folder, and every empty folder."""
    found: Contents = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file():
            found[name] = path.read_bytes()
        elif not any(path.iterdir()):
            found[name] = None
    return found


def bench_contents(folder: Path) -> Contents:
    """Without times: pictures and reports are made of them."""
    found = plain_contents(folder)
    for name in found:
        if name.endswith("rows.jsonl"):
            rows = [json.loads(line) for line in found[name].splitlines()]
            found[name] = [{key: row[key] for key in row.keys() - TIMES} for row in rows]
        elif name.endswith(("run.json", "summary.json", "report.md", ".png")):
            found[name] = len(found[name]) > 0
    return found


def train_contents(folder: Path) -> Contents:
    """Without times; pickles by what they hold, because their bytes tell which values were one object."""
    found = plain_contents(folder)
    for name in found:
        if name.endswith(".pt"):
            found[name] = plain_values(torch.load(folder / name, weights_only=False))
        if name.endswith("state.json"):
            state = json.loads(found[name])
            found[name] = state | {"files": sorted(state["files"])}
        if name.endswith("metrics.jsonl"):
            lines = [json.loads(line) for line in found[name].splitlines()]
            times = {"seconds", "tokens_per_second"}
            found[name] = [{key: line[key] for key in line.keys() - times} for line in lines]
    return found


def plain_values(value: Any) -> Any:
    """Such as can be compared."""
    if isinstance(value, dict):
        return {str(name): plain_values(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(inner) for inner in value]
    if isinstance(value, Tensor | np.ndarray):
        return str(value.dtype), value.tolist()
    return value if isinstance(value, str | int | float | None) else type(value)


@dataclass
class Job:
    """A command that writes into the folder in which it is run."""

    argv: list[str]
    contents: Callable[[Path], Contents] = plain_contents
    environment: dict[str, str] = field(default_factory=dict)
    is_done: Callable[[Path], bool] = lambda folder: False
    """Whether it would refuse, because all is there."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> dict[str, Job]:
    home = tmp_path_factory.mktemp("jobs")
    target = make_target(home / "target", tiny_folder)
    dataset = make_dataset(home / "data")
    prompts = home / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell me about {n}"}) + "\n" for n in range(40)))
    write_gguf(home / "tiny.gguf", kind="Q8_0")
    cpu = ["--device", "cpu", "--dtype", "float32"]
    train = [*BASE, f"target.path={target}", f"data.train=[{dataset}]", "run=run", "resume=latest"]
    train += ["stage.micro_batch=2", "stage.accumulation=1", "stage.num_steps=6", "saving.keep=2"]
    return {
        "synthesis": Job(
            [
                *("data", "synthesize", "--output", "data", "--target", str(tiny_folder), "--tokens", "1500"),
                *("--mode", "prompts", "--prompts", str(prompts), "--max-new-tokens", "12", *cpu),
                *("--batch", "16", "--shard-samples", "16", "--seq-length", "128"),
            ]
        ),
        "training": Job(["train", *train], train_contents),
        "conversion": Job(
            [
                *("generate", "hi", "--target", str(home / "tiny.gguf"), "--max-new-tokens", "2"),
                *("--no-calibrate", "--method", "vanilla", *cpu),
            ],
            environment={"LONGSPEC_CACHE": "."},
        ),
        "bench": Job(
            [
                *("bench", "generate", "--workload", str(prompts), "--limit", "4", "--max-new-tokens", "8"),
                *("--methods", "lookup", "--repeats", "1", "--output", "run", "--target", str(tiny_folder)),
                *cpu,
            ],
            bench_contents,
        ),
        "export": Job(
            ["export", str(home / "trained" / "run"), "draft"],
            is_done=lambda folder: (folder / "draft").exists(),
        ),
    }


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
def test_a_hundred_kills(jobs: dict[str, Job], tmp_path: Path) -> None:
    rng, runs = random.Random(21), Runs(tmp_path)
    assert runs(jobs["training"], Path(jobs["export"].argv[1]).parent)
    for name, job in jobs.items():
        unbroken, begun = tmp_path / f"{name}-unbroken", time.monotonic()
        assert runs(job, unbroken)
        seconds, num_accesses = time.monotonic() - begun, runs.num_accesses(unbroken)
        expected, left = job.contents(unbroken), KILLS // len(jobs)
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
