"""Commands that write, each into the folder in which it is run, and what they have written then."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.bench.test_runs import TIMES
from tests.hub.gguf_samples import write_gguf
from tests.train.tiny import BASE, make_dataset, make_target

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

    output: str
    """What it writes, as messages name it."""
    argv: list[str]
    contents: Callable[[Path], Contents] = plain_contents
    environment: dict[str, str] = field(default_factory=dict)
    is_done: Callable[[Path], bool] = lambda folder: False
    """Whether it would refuse, because all is there."""


def make_jobs(home: Path, tiny_folder: Path) -> dict[str, Job]:
    """By name; the run that is exported has to be trained first, in `home / "trained"`."""
    target = make_target(home / "target", tiny_folder)
    dataset = make_dataset(home / "data")
    prompts = home / "prompts.jsonl"
    lines = [{"prompt": f"Tell me about {n}", "text": f"Some words about {n}, " * 40} for n in range(40)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_gguf(home / "tiny.gguf", kind="Q8_0")
    cpu = ["--device", "cpu", "--dtype", "float32"]
    train = [*BASE, f"target.path={target}", f"data.train=[{dataset}]", "run=run", "resume=latest"]
    train += ["stage.micro_batch=2", "stage.accumulation=1", "stage.num_steps=6", "saving.keep=2"]
    return {
        "preparation": Job(
            "data",
            [
                *("data", "prepare", str(prompts), "--output", "data", "--target", str(tiny_folder)),
                *("--seq-length", "64", "--shard-sequences", "16", "--workers", "1"),
            ],
        ),
        "synthesis": Job(
            "data",
            [
                *("data", "synthesize", "--output", "data", "--target", str(tiny_folder), "--tokens", "1500"),
                *("--mode", "prompts", "--prompts", str(prompts), "--max-new-tokens", "12", *cpu),
                *("--batch", "16", "--shard-samples", "16", "--seq-length", "128"),
            ],
        ),
        "training": Job("run", ["train", *train], train_contents),
        "conversion": Job(
            "gguf",
            [
                *("generate", "hi", "--target", str(home / "tiny.gguf"), "--max-new-tokens", "2"),
                *("--no-calibrate", "--method", "vanilla", *cpu),
            ],
            environment={"LONGSPEC_CACHE": "."},
        ),
        "bench": Job(
            "run",
            [
                *("bench", "generate", "--workload", str(prompts), "--limit", "4", "--max-new-tokens", "8"),
                *("--methods", "lookup", "--repeats", "1", "--output", "run", "--target", str(tiny_folder)),
                *cpu,
            ],
            bench_contents,
        ),
        "export": Job(
            "draft",
            ["export", str(home / "trained" / "run"), "draft"],
            is_done=lambda folder: (folder / "draft").exists(),
        ),
    }
