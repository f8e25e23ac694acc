"""Several processes hold one target together: they say what one process says, and a lost one is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import Qwen2Config

from benchmarks.shapes import write_random_pair
from longspec import LongSpec, UserError
from longspec.config import DraftConfig
from longspec.engine import ranks
from longspec.engine.ranks import RankError
from longspec.engine.sequence import Sequence
from longspec.models.placement import check_equal, pick_devices
from tests.cli.run import exit_code

# No number of ranks divides it, so that the last rank has fewer rows.
V = 67
PROMPTS = [[(5 * place * place + 3 * row) % V for place in range(6 + 40 * row)] for row in range(4)]
METHODS: dict[str, dict[str, Any]] = {
    "vanilla": {"method": "vanilla"},
    "seq": {"method": "seq", "gamma": 3},
    "doubting": {"method": "seq", "gamma": 3, "min_confidence": 0.2},
    "tree": {"method": "tree", "tree_shape": (8, 16, 16)},
    "pruned": {"method": "tree", "tree_shape": (8, 16), "max_nodes": 12, "num_lookup": 3},
    "magicdec": {"method": "magicdec", "gamma": 3, "window": 16},
    "lookup": {"method": "lookup"},
    "drawn": {"method": "tree", "tree_shape": (4, 8), "acceptance": "rejection"},
    "auto": {"method": "auto"},
}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 7},
]


def make_pair(folder: Path, tokenizer: Path, tied: bool, head_dim: int = 4) -> tuple[Path, Path]:
    """A random target with 4 KV heads, and a draft with every part that there is."""
    heads: Any = {"head_dim": head_dim}
    config = Qwen2Config(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        **heads,
        max_position_embeddings=512,
        initializer_range=0.4,
        tie_word_embeddings=tied,
    )
    every_part = DraftConfig(
        window=32, max_lag=4, cross_layers=(-1, 0, 1), use_feature=True, lag_gate=True, final_norm=True,
        draft_vocab=50, intermediate_size=24, use_parent=True,
    )  # fmt: skip
    return write_random_pair(folder, tokenizer, config, every_part, std=0.3)


@pytest.fixture(scope="module")
def pair(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), smollm2_folder, tied=True)


@contextmanager
def loaded(pair: tuple[Path, Path], num_ranks: int = 2) -> Iterator[LongSpec]:
    model = LongSpec.from_pretrained(
        *pair, dtype="float32", device="cpu", calibrate=False, draft_dtype="target", max_rows=3,
        tensor_parallel=num_ranks,
    )  # fmt: skip
    try:
        yield model
    finally:
        model.close()


def said(model: LongSpec, in_full: bool) -> dict[str, list[tuple[list[int], list[int]]]]:
    """The words of all methods, and at which depth each was accepted; more prompts than rows."""
    found = {}
    for number, (name, method) in enumerate(METHODS.items()):
        for which, sampling in enumerate(SAMPLINGS):
            is_left_out = which != number % 2 and not in_full
            if is_left_out or (name == "drawn" and not sampling["temperature"]):
                continue
            answers = model.generate(
                PROMPTS, max_new_tokens=12 if in_full else 7, eos_ids=(), **method, **sampling
            )
            key = f"{name} at {sampling['temperature']}"
            found[key] = [(answer.token_ids, answer.depths) for answer in answers]
    guided = Sequence(PROMPTS[0], 4, num_logprobs=2)
    model.engine.run([guided])
    tops = [[token for token, _ in top] for _, top in guided.logprobs]
    found["guided"] = [(guided.tokens, tokens) for tokens in tops]
    return found


def compare(pair: tuple[Path, Path], num_ranks: int, in_full: bool = True) -> None:
    with loaded(pair, 1) as model:
        alone = said(model, in_full)
    # The draft is worth something, or its part would not be tested.
    drafted = [rows for name, rows in alone.items() if name.startswith(("seq", "tree", "pruned", "drawn"))]
    assert sum(depth > 0 for rows in drafted for _, depths in rows for depth in depths) > 5
    with loaded(pair, num_ranks) as model:
        assert model.engine.models.pages.keys.shape[1] == 4 // num_ranks
        assert said(model, in_full) == alone


def test_two_ranks_say_what_one_process_says(pair: tuple[Path, Path]) -> None:
    compare(pair, 2, in_full=False)


@pytest.mark.full
def test_four_ranks_with_a_head_of_its_own(smollm2_folder: Path, tmp_path: Path) -> None:
    compare(make_pair(tmp_path, smollm2_folder, tied=False), 4)


@pytest.mark.full
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_fused_rounds_on_two_ranks(kv_dtype: str, smollm2_folder: Path, tmp_path: Path) -> None:
    """By our own kernels, which Triton's interpreter runs here; only they have KV in fp8."""
    pair = make_pair(tmp_path, smollm2_folder, tied=True, head_dim=16)
    found = []
    for num_ranks, attention in ((1, "torch" if kv_dtype == "auto" else "triton"), (2, "triton")):
        model = LongSpec.from_pretrained(
            *pair, dtype="float32", device="cpu", calibrate=False, draft_dtype="target", max_rows=1,
            max_length=24, tensor_parallel=num_ranks, attention=attention, kv_dtype=kv_dtype,
        )  # fmt: skip
        assert model.engine.models.fused == (attention == "triton")
        answers = [
            model.generate(PROMPTS[0], max_new_tokens=4, eos_ids=(), **method)
            for method in (
                {"method": "vanilla"},
                {"method": "tree", "tree_shape": (4, 6), "temperature": 0.8, "seed": 3},
            )
        ]
        model.close()
        found.append([answer.token_ids for answer in answers])
    assert found[0] == found[1]


@pytest.mark.full
def test_real_weights_on_three_ranks() -> None:
    prompts = ["Why is the sky blue?", "Say three times: red lorry, yellow lorry.", "def add(a, b):"]

    def answers(num_ranks: int) -> dict[str, list[list[int]]]:
        model = LongSpec.from_pretrained(
            dtype="float32", device="cpu", calibrate=False, tensor_parallel=num_ranks, max_rows=3
        )
        found = {}
        for method in ("vanilla", "seq", "tree", "lookup", "magicdec", "auto"):
            for temperature in (0.0, 0.8):
                options: Any = {"method": method, "temperature": temperature, "seed": 5}
                answered = model.generate(prompts, max_new_tokens=24, **options)
                found[f"{method} {temperature}"] = [one.token_ids for one in answered]
                if num_ranks > 1 and method == "tree":
                    # Rounding in the draft moves it a little.
                    assert min(one.tau for one in answered) > 1.8
        model.close()
        return found

    assert answers(3) == answers(1)


def follower(model: LongSpec) -> int:
    assert model.engine.device.ranks is not None
    return model.engine.device.ranks.process_ids[0]


def is_gone(process: int) -> bool:
    """Whether it has ended, even if nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(is_so: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("sign", "told"),
    [
        (signal.SIGKILL, "ended, with code -9"),
        pytest.param(signal.SIGSTOP, "has not answered for 3 s", marks=pytest.mark.full),
    ],
)
def test_a_lost_rank_is_named_and_nobody_waits(
    pair: tuple[Path, Path], sign: signal.Signals, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT", 3.0)
    with loaded(pair) as model:
        process = follower(model)
        stream = model.stream(PROMPTS[0], max_new_tokens=400, eos_ids=(), method="vanilla")
        next(stream)
        os.kill(process, sign)
        with pytest.raises(RankError, match=rf"rank 1 of 2 \(process {process} on cpu\) .*{told}"):
            list(stream)
        with pytest.raises(RankError, match="load the model again"):
            model.generate(PROMPTS[0], max_new_tokens=4)
    assert is_gone(process)


SCRIPT = """
import sys, time
from longspec import LongSpec
model = LongSpec.from_pretrained(sys.argv[1], device="cpu", calibrate=False, tensor_parallel=2)
print(*model.engine.device.ranks.process_ids, flush=True)
time.sleep(600)
"""


@pytest.mark.full
def test_without_rank_0_the_others_end(pair: tuple[Path, Path]) -> None:
    command = [sys.executable, "-c", SCRIPT, str(pair[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        process = int(leader.stdout.readline())
        leader.kill()
    until(lambda: is_gone(process))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tensor-parallel", "2"], "num_key_value_heads of 3; use 1 or 3"),
        (["--tensor-parallel", "0"], "tensor_parallel is 0; it must be at least 1"),
        (["--tensor-parallel", "3", "--device", "cpu,cpu"], "names 2 devices, but tensor_parallel is 3"),
        (["--tensor-parallel", "3", "--weights", "int8"], "'int8' do not go with tensor_parallel 3"),
        (["--tensor-parallel", "3", "--device", "cuda"], "torch sees 0 CUDA devices"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert exit_code(["generate", "hello", *flags]) == 2
    assert told in capsys.readouterr().err


def test_gpus_must_be_there_and_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    with pytest.raises(UserError, match="tensor_parallel 4 needs 4 GPUs from cuda:0 on, but torch sees 2"):
        pick_devices("cuda", 4)
    with pytest.raises(UserError, match="rank 1 would run on GPU 1 and rank 0 on GPU 0"):
        pick_devices("cuda", 2)
    assert pick_devices("cuda:1,cuda:1", 2) == (torch.device("cuda:1"),) * 2
    check_equal(["A", "A"])


def test_info_plans_for_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*flags: str) -> dict[str, Any]:
        assert exit_code(["info", "--device", "cpu", "--json", *flags]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    whole, part = plan(), plan("--tensor-parallel", "3")
    assert part["kv_bytes_per_token"] * 3 == whole["kv_bytes_per_token"]
    assert part["needs"]["weights"] < 0.34 * whole["needs"]["weights"]
    assert part["free_bytes"] < 0.4 * whole["free_bytes"]
    assert part["parameters"] == whole["parameters"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.full
def test_torchrun_starts_the_ranks(tiny_folder: Path) -> None:
    """Only rank 0 prints, and a wrong number of processes is told."""

    def run(num_ranks: int, num_processes: int) -> subprocess.CompletedProcess[str]:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
        asked = ["generate", "hello there", "--raw", "--json", "--target", str(tiny_folder), "--ignore-eos"]
        options = [
            "--device",
            "cpu",
            "--max-new-tokens",
            "5",
            "--tensor-parallel",
            str(num_ranks),
            "--no-calibrate",
        ]
        command = [sys.executable, *launch, "-m", "longspec", *asked, *options]
        return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=200)

    done = run(2, 2)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["tokens"] == 5
    assert "tensor_parallel is 4, and torchrun started 2 processes" in run(4, 2).stderr


@pytest.mark.full
def test_a_server_ends_with_its_rank(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "longspec", "serve", "--target", str(tiny_folder), "--device", "cpu"]
    command += ["--port", "0", "--tensor-parallel", "2", "--no-calibrate"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    with subprocess.Popen(command, **pipes) as server:
        assert server.stdout is not None
        server.stdout.readline()
        address = server.stdout.readline().split()[0]
        asked = {"prompt": "hello there", "max_tokens": 4}
        answer = httpx.post(f"{address}/v1/completions", json=asked, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] > 0
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        names = {child: Path(f"/proc/{child}/cmdline").read_text() for child in children}
        (rank,) = [child for child, name in names.items() if "longspec.engine.follow" in name]
        os.kill(int(rank), signal.SIGKILL)
        _, told = server.communicate(timeout=60)
    assert server.returncode == 2
    assert f"rank 1 of 2 (process {rank} on cpu) ended" in told
