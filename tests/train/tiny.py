"""Small enough to train in seconds: a random target and a dataset of its own text-like tokens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longspec.data.shards import Packed, Role, finish, write_shard

VOCAB = 128
BASE = (
    "draft=glide",
    "stage.optimizer=adamw",
    "stage.soft=0.0",
    "stage.lag_decay=1.0",
    "stage.mask_prompt=false",
    "stage.seq_length=32",
    "stage.num_steps=8",
    "stage.lr=1e-2",
    "stage.max_offset=64",
    "draft.window=16",
    "draft.max_lag=3",
    "saving.save_steps=2",
    "saving.log_steps=1",
    "evaluation.every=4",
    "evaluation.new_tokens=12",
    "evaluation.gamma=3",
    "data.num_held_out=4",
    "target.dtype=float32",
    "target.device=cpu",
)


def make_target(folder: Path, tokenizer: Path, **changes: Any) -> Path:
    """A random Llama whose vocabulary ends long before the tokenizer's: tests give it ids."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
        "initializer_range": 0.3,
    }
    LlamaForCausalLM(LlamaConfig(**shape | changes)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder


def make_dataset(folder: Path, length: int = 32, count: int = 60, seed: int = 0) -> Path:
    """Sequences that repeat a few tokens, so that there is something to learn."""
    chance = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        pattern = chance.integers(3, VOCAB, 5)
        tokens = np.resize(pattern, length)
        starts = np.array([0, int(chance.integers(8, length - 8))], np.int32)
        roles = np.full(length, Role.TEXT, np.uint8)
        roles[:3] = Role.PROMPT
        sequences.append(Packed(tokens, roles, starts))
    write_shard(folder, 0, sequences, VOCAB, [])
    finish(folder, 1, VOCAB, None, {})
    return folder


def launch(
    overrides: list[str], processes: int = 1, launcher: str = "torchrun", module: str = "longspec.train"
) -> subprocess.Popen[str]:
    """Start `longspec.train` as users do, under a launcher when there are several processes."""
    command = [sys.executable, "-m"]
    if processes > 1 and launcher == "torchrun":
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    elif processes > 1:
        command = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", str(processes)]
        command += ["--master_port", str(free_port()), "--module"]
    # The deepspeed launcher counts accelerators and calls its workers by the first python of the path.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = no_launcher() | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": path}
    return subprocess.Popen(
        [*command, module, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def no_launcher() -> dict[str, str]:
    """The environment without what training in this very process left there, as a launcher would have."""
    left = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in left}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run(
    overrides: list[str], processes: int = 1, launcher: str = "torchrun", module: str = "longspec.train"
) -> str:
    """Run it to the end; its output on success."""
    process = launch(overrides, processes, launcher, module)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def losses(run_folder: Path) -> dict[int, float]:
    """By step."""
    return _figures(run_folder, "loss")


def taus(run_folder: Path) -> dict[int, float]:
    """Of each evaluation, by step."""
    return _figures(run_folder, "eval_tau")


def _figures(run_folder: Path, name: str) -> dict[int, float]:
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row[name] for row in rows if name in row}
