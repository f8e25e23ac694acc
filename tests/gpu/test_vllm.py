"""The draft's chains for another engine, recorded as CUDA graphs, and vLLM itself where it is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.engine.graph import capture
from longspec.models.layers import look_up
from longspec.vllm.captured import CapturedChains, Work
from longspec.vllm.chain import ChainParts, CrossAttention, Roots, draft_chain
from longspec.vllm.ring import BatchRing
from tests.decoding.scripted import tiny_draft, tiny_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GAMMA, ROWS, LONGEST = 3, 5, 48


def record_on(device: torch.device) -> Callable[[Work], Work]:
    """See `CapturedChains`; without a GPU the work itself."""
    if device.type == "cpu":
        return lambda work: work
    return lambda work: capture([work], device)[0].replay


def compare_captured(device: torch.device) -> None:
    """Draft the same batches with a captured graph and without one, and compare the chains. The sizes of
    the batches change, and each way has its own ring."""
    torch.manual_seed(0)
    target = tiny_target(3, vocab_size=40, num_layers=3, hidden_size=64, head_dim=32).to(device)
    draft, config = tiny_draft(target), target.config
    target.rope.reserve(LONGEST + GAMMA + 1)
    shape = (config.num_layers, ROWS, config.num_kv_heads, LONGEST, config.head_dim)
    keys, values = torch.randn(2, *shape, device=device)

    def over(table: Tensor, lengths: Tensor) -> CrossAttention:
        def cross(layer: int, q: Tensor) -> Tensor:
            sees = torch.arange(LONGEST, device=device) < lengths[:, None]
            k, v = (part[layer][table[:, 0]] for part in (keys, values))
            mask = sees[:, None, None]
            return F.scaled_dot_product_attention(q[:, :, None], k, v, mask, enable_gqa=True)[:, :, 0]

        return cross

    def parts() -> ChainParts:
        ring = BatchRing(config, draft.config, ROWS, GAMMA, device, torch.float32)
        return ChainParts(
            draft,
            target.rope,
            ring,
            lambda tokens: look_up(target.table, tokens),
            lambda hidden: target.logits(hidden).argmax(-1),
        )

    direct, recorded = parts(), parts()
    chains = CapturedChains(recorded, GAMMA, over, record_on(device))
    for number, count in enumerate((3, 1, 4, 5, 2, 3, 5)):
        rows = torch.randperm(ROWS, device=device)[:count]
        table, positions = rows[:, None].int(), torch.full_like(rows, 10 + 2 * number)
        tokens = torch.randint(0, 40, (count, GAMMA + 1), device=device)
        feature = torch.randn(count, config.hidden_size, device=device)
        roots = Roots(rows, positions, tokens, torch.randint_like(rows, 1, GAMMA + 2), feature)
        expected = draft_chain(direct, roots, GAMMA, over(table, positions))
        assert chains(roots, table).tolist() == expected.tolist()
    assert torch.allclose(direct.ring.keys[:ROWS], recorded.ring.keys[:ROWS], atol=1e-4)


@torch.inference_mode()
def test_recorded_chains_are_those_launched_directly() -> None:
    compare_captured(torch.device("cuda"))


@pytest.mark.full
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM beside longspec")
def test_vllm_with_the_draft_that_ships(smollm2_folder: Path) -> None:
    """The draft is accepted as often with graphs as without, up to what bf16 changes."""
    prompts = Path(__file__).parent.parent.parent / "src/longspec/bench/builtin.jsonl"
    program = Path(__file__).parent.parent.parent / "benchmarks/vllm_draft.py"
    command = [sys.executable, program, smollm2_folder, prompts, "--systems", "draft", "draft-eager"]
    command += ["--concurrency", "1", "5", "--requests", "10", "--max-new-tokens", "64"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "accepted by depth" in line]
    shares = [[float(share) for share in line.split(":")[-1].split()] for line in lines]
    assert len(shares) == 2, done.stderr[-4000:]
    assert shares[0] == pytest.approx(shares[1], abs=0.05)
    assert shares[0][0] > 0.4
