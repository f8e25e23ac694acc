"""The memory plan is what is taken, and what does not fit ends in one line that says what to shrink."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.shapes import shape_named
from longspec import LongSpec
from longspec.cache import DraftRing, Pages
from longspec.cli.main import main
from longspec.config import DraftConfig
from longspec.models.draft import GlideDraft
from longspec.models.native_linears import has_native_products

# Runs the command line once for each number of megabytes that it may take beyond what the libraries do: those
# are there, and used, before the limit is set.
LIMITED = """
import os, resource, sys
import longspec.cli.main as program
from longspec import LongSpec
LongSpec.from_pretrained(sys.argv[1], device="cpu", calibrate=False).generate("Hi", max_new_tokens=2)
for megabytes in sys.argv[2].split(","):
    if os.fork() == 0:
        status = open("/proc/self/status").read().splitlines()
        size = next(int(line.split()[1]) for line in status if line.startswith("VmSize:"))
        limit = size * 1024 + int(megabytes) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        os._exit(program.main(sys.argv[3:]))
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 2
"""


def test_the_plan_is_what_is_taken(
    tiny: LongSpec, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny.target
    config = DraftConfig(window=64, draft_vocab=1000, cross_layers=(0, -1))
    draft = GlideDraft(target.config, config)
    draft.initialise(torch.Generator().manual_seed(0))
    draft.save_pretrained(tmp_path / "draft", target, str(tiny_folder))
    size = sum(weight.numel() for weight in draft.parameters()) + 1000 * target.config.hidden_size
    flags = f"--context 500 --batch 3 --tree-shape 2,4 --draft {tmp_path / 'draft'} --dtype float32"
    assert main(["info", str(tiny_folder), "--device", "cpu", *flags.split(), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    needs = facts["needs"]
    # 507 entries of each row, in whole pages; the dump page is one for all.
    pages = Pages.empty(target.config, 3 * 32 - 1, 16, target.device, target.dtype)
    assert needs["kv"] == pages.num_bytes
    ring = DraftRing.empty(target.config, config, 3, 7, target.device, target.dtype)
    assert needs["draft_kv"] == ring.num_bytes
    assert needs["draft_weights"] == 4 * size
    assert needs["weights"] == 4 * target.config.num_parameters
    assert needs["graphs"] == 0, "no rounds are captured on a CPU"
    target.rope.reserve(507)
    assert needs["rope"] <= 4 * target.rope.table.numel()
    total = needs.pop("total")
    assert total == sum(needs.values())
    assert facts["left_bytes"] == facts["free_bytes"] - total
    assert facts["free_bytes"] <= facts["device_bytes"]
    # What an engine takes by itself is what it takes when it is loaded.
    engine, loaded = facts["engine"], tiny.engine
    assert engine["max_rows"] == loaded.device.max_rows
    assert engine["max_length"] == loaded.max_length
    assert engine["kv_tokens"] == loaded.statistics.num_pages * loaded.models.pages.size


@pytest.mark.parametrize("use_feature", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_a_drafts_weights_are_counted(use_feature: bool, qkv_bias: bool) -> None:
    target = replace(shape_named("tiny"), num_heads=6, intermediate_size=20)
    config = DraftConfig(
        cross_layers=(0, 1),
        use_feature=use_feature,
        qkv_bias=qkv_bias,
        final_norm=use_feature,
        intermediate_size=24 * use_feature,
        lag_gate=use_feature,
        use_parent=use_feature,
    )
    built = GlideDraft(target, config)
    assert config.num_parameters(target) == sum(weight.numel() for weight in built.parameters())


def test_what_does_not_fit_is_said(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tiny_folder), "--device", "cpu", "--batch", str(10**9)]) == 0
    text = capsys.readouterr().out
    assert "are missing" in text
    assert "a smaller --batch, --dtype, --weights or --kv-dtype, or another --device" in text
    assert main(["info", str(tiny_folder), "--context", "2049"]) == 2
    assert "--context is 2049; the target's limit is 2048 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_ggufs_weights_count_as_a_cpu_keeps_them(
    weights: str, smollm2: LongSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    if not has_native_products():
        pytest.skip("no C compiler here")
    flags = ["info", "smollm2-135m", "--device", "cpu", "--dtype", "float32", "--weights", weights]
    assert main(flags) == 0
    assert f"in {weights} (matrices: about 0.73 bytes per weight)" in capsys.readouterr().out
    assert main([*flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["needs"]["weights"]
    target = smollm2.target
    if weights == "int8":
        target = LongSpec.from_pretrained("smollm2-135m", weights="int8", calibrate=False).target
    kept = {*target.parameters(), *target.buffers()} - {target.rope.table}
    assert told == pytest.approx(sum(one.nbytes for one in kept), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_in_half_precision_counts_as_a_cpu_keeps_it(
    dtype: torch.dtype, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not has_native_products():
        pytest.skip("no C compiler here")
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    LlamaForCausalLM.from_pretrained(tiny_folder, dtype=dtype).save_pretrained(tmp_path)
    flags = ["info", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--draft", "none"]
    assert main(flags) == 0
    assert "in float32 (matrices: about 2 bytes per weight)" in capsys.readouterr().out
    assert main([*flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["needs"]["weights"]
    loaded = LongSpec.from_pretrained(tmp_path, dtype="float32", device="cpu", calibrate=False)
    kept = {*loaded.target.parameters(), *loaded.target.buffers()} - {loaded.target.rope.table}
    assert told == pytest.approx(sum(one.nbytes for one in kept), rel=0.01)


def test_running_out_of_memory_says_what_to_shrink(smollm2_folder: Path, tiny_folder: Path) -> None:
    """Too little for the file, for the weights, and for the pages of KV beside the weights."""
    flags = "generate --device cpu --dtype float32 --method vanilla --draft none --max-rows 16 Hi"
    program = [sys.executable, "-c", LIMITED, str(tiny_folder), "150,700,2500", *flags.split()]
    result = subprocess.run(
        program, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 3
    for line in lines[:2]:
        assert re.search(r"not enough memory for the 0\.\d GB of smollm2-135m in float32 .*on cpu", line)
        assert "a smaller dtype, a smaller target or another device" in line
    assert re.search(
        r"there is not enough memory for \d+ tokens of KV on cpu; lower max_length, max_rows or kv_memory",
        lines[2],
    )
