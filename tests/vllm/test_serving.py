"""vLLM itself with our draft: its words, its acceptance, and its server."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm_draft import accepted_by_depth, rounds_of
from longspec import LongSpec
from longspec.bench.workloads import read_file
from longspec.hub import resolve_draft
from tests.vllm.answer import SURROUNDINGS
from tests.vllm.conftest import ROOT
from tests.vllm.test_chain import GAMMA

pytestmark = pytest.mark.full

NEW_TOKENS = 64
Steps = list[list[list[int]]]
"""The tokens of each step of each prompt."""


@pytest.fixture(scope="module")
def prompts(whole_head: LongSpec) -> list[list[int]]:
    """Twenty, half of them about one document, whose prefix is shared."""
    questions = [
        item.turns[0] for item in read_file(Path(str(files("longspec.bench") / "builtin.jsonl"))).items
    ]
    document = (ROOT / "docs" / "architecture.md").read_text()[:2500]
    questions += [f"{document}\n\n{question}" for question in questions]
    vocab_size = whole_head.target.config.vocab_size
    return [whole_head.encoder.encode(question, False, vocab_size) for question in questions]


def answers(
    vllm_bin: Path, folder: Path, target: Path, prompts: list[list[int]], batches: list[int], **settings: Any
) -> list[Steps]:
    """What vLLM says to all prompts, once for each batch size."""
    goal, speculative = folder / "answers.json", settings.pop("speculative_config", None)
    job = {"target": str(target), "speculative": speculative, "prompts": prompts, "batches": batches}
    job |= {"max_new_tokens": NEW_TOKENS, "goal": str(goal), "settings": {"max_model_len": 2048, **settings}}
    program = Path(__file__).parent / "answer.py"
    done = subprocess.run(
        [vllm_bin / "python", program], input=json.dumps(job), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[Steps] = json.loads(goal.read_text())
    return found


def words(run: Steps) -> list[list[int]]:
    return [[token for step in steps for token in step] for steps in run]


def test_words_and_acceptance(
    vllm_bin: Path, whole_head: LongSpec, smollm2_folder: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """The words are those of vLLM without a draft: alone, in batches, with prompts in chunks, with prefixes
    from the cache, and with few pages. Acceptance is that of our engine."""
    speculative = {"model": str(resolve_draft("smollm2-135m")), "num_speculative_tokens": GAMMA}
    common = (vllm_bin, tmp_path, smollm2_folder, prompts)
    (plain,) = answers(*common, [8])
    drafted = answers(*common, [1, 8], speculative_config=speculative, max_num_batched_tokens=256)
    # Few pages, of which half of the prompts share some; nobody is preempted with as many.
    drafted += answers(*common, [8], speculative_config=speculative, num_gpu_blocks_override=24)
    for run in drafted:
        assert words(run) == words(plain)
    ours = [
        whole_head.generate(ids, method="seq", gamma=GAMMA, max_new_tokens=NEW_TOKENS, temperature=0)
        for ids in prompts
    ]
    assert words(plain) == [answer.token_ids for answer in ours]
    expected = accepted_by_depth([rounds_of(answer.depths) for answer in ours], GAMMA)
    for run in drafted:
        found = accepted_by_depth([list(map(len, steps)) for steps in run], GAMMA)
        assert found == pytest.approx(expected, rel=0.03)


def test_tensor_parallelism(
    vllm_bin: Path, smollm2_folder: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Three ranks, each with a third of the heads, keep as many tokens in each round as one does."""
    speculative = {"model": str(resolve_draft("smollm2-135m")), "num_speculative_tokens": GAMMA}
    common = (vllm_bin, tmp_path, smollm2_folder, prompts[:3])
    alone = answers(*common, [3], speculative_config=speculative)
    assert answers(*common, [3], speculative_config=speculative, tensor_parallel_size=3) == alone


def test_vllm_serve(
    vllm_bin: Path, whole_head: LongSpec, smollm2_folder: Path, prompts: list[list[int]]
) -> None:
    """By the command line, whose workers are processes of their own; beside a request that is sampled."""
    speculative = json.dumps({"method": "longspec", "model": "smollm2-135m", "num_speculative_tokens": GAMMA})
    with served(vllm_bin, smollm2_folder, "--speculative-config", speculative) as address:
        ask = {"model": "m", "prompt": [prompts[0], prompts[1]], "max_tokens": 24}
        found = post(f"{address}/v1/completions", ask | {"temperature": 0})
        sampled = post(f"{address}/v1/completions", ask | {"temperature": 1, "seed": 3})
        told = urllib.request.urlopen(f"{address}/metrics").read().decode()
    ours = whole_head.generate(prompts[:2], method="vanilla", max_new_tokens=24, temperature=0)
    assert [choice["text"] for choice in found["choices"]] == [answer.text for answer in ours]
    assert sampled["usage"]["completion_tokens"] > 0
    accepted = re.search(r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} ([\d.]+)", told, re.MULTILINE)
    assert accepted is not None
    assert float(accepted[1]) > 5


def test_what_cannot_be_served_is_refused(vllm_bin: Path, smollm2_folder: Path) -> None:
    speculative = {"method": "longspec", "model": "smollm2-135m", "num_speculative_tokens": 9}
    command = server_command(vllm_bin, smollm2_folder, "--speculative-config", json.dumps(speculative))
    done = subprocess.run(command, capture_output=True, text=True, env=SURROUNDINGS)
    assert done.returncode != 0
    assert "num_speculative_tokens is 9; the draft smollm2-135m was trained for 1 to 8" in done.stderr


def server_command(vllm_bin: Path, target: Path, *options: str) -> list[str]:
    """`vllm serve`, by the module behind it: the CPU build's program does not find its own version."""
    command = [str(vllm_bin / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += ["--served-model-name", "m", "--dtype", "float32", "--enforce-eager"]
    return [*command, "--max-model-len", "2048", *options]


def post(address: str, content: dict[str, Any]) -> Any:
    data = json.dumps(content).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


@contextmanager
def served(vllm_bin: Path, target: Path, *options: str) -> Iterator[str]:
    """`vllm serve` on a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = server_command(vllm_bin, target, "--port", port, *options)
    server = subprocess.Popen(command, env=SURROUNDINGS, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            time.sleep(1)
            assert server.poll() is None, "vllm serve ended"
            try:
                urllib.request.urlopen(f"{address}/health")
                break
            except OSError:
                continue
        yield address
    finally:
        server.terminate()
        server.wait(60)
