"""Training on a GPU: flash attention in pieces, the fused losses, and the whole objective in bf16."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from torch import Tensor

from longspec.attention.packed import Pieces, attend_ends, attend_packed
from longspec.config import DraftConfig
from longspec.data.collate import collate
from longspec.data.shards import Packed, Role
from longspec.models.draft import GlideDraft
from longspec.train.layout import head_rows, lay_out
from longspec.train.losses import LossShares, head_loss
from longspec.train.objective import Objective
from tests.decoding.scripted import tiny_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda")


@pytest.mark.parametrize("window", [None, 40, 512])
@pytest.mark.parametrize("starts", [(0, 700), (0, 1, 5, 130, 350, 699, 700, 1000)])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (8, 8, 128), (14, 2, 96)])
def test_flash_in_pieces_equals_fp64_with_gradients(
    window: int | None, starts: tuple[int, ...], heads: int, kv_heads: int, size: int
) -> None:
    generator = torch.Generator(GPU).manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randn(2, 700, count, size, device=GPU, generator=generator).bfloat16()

    q, k, v, weight = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
    pieces = Pieces(starts, 1400, 700, GPU)
    results = []
    for kind in (torch.bfloat16, torch.float64):
        inputs = [x.detach().to(kind, copy=True).requires_grad_() for x in (q, k, v)]
        out = attend_packed(inputs[0], inputs[1], inputs[2], pieces, window)
        (out * weight.to(kind)).sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    for ours, exact in zip(*results, strict=True):
        assert ours is not None
        assert exact is not None
        assert (ours.double() - exact).norm() < 0.01 * exact.norm()


def test_queries_at_the_end_of_pieces_equal_fp64_with_gradients() -> None:
    generator = torch.Generator(GPU).manual_seed(0)
    queries = Pieces((0, 1, 40, 300), 310, 700, GPU)
    keys = Pieces((0, 100, 139, 700), 1100, 700, GPU)

    def draw(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, 64, device=GPU, generator=generator).bfloat16()

    q, k, v, weight = draw(310, 45), draw(1100, 15), draw(1100, 15), draw(310, 45)
    results = []
    for kind in (torch.bfloat16, torch.float64):
        asked = q.to(kind, copy=True).requires_grad_()
        out = attend_ends(asked, k.to(kind), v.to(kind), queries, keys)
        (out * weight.to(kind)).sum().backward()
        results.append([out, asked.grad])
    for ours, exact in zip(*results, strict=True):
        assert ours is not None
        assert exact is not None
        assert (ours.double() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_liger_and_chunks_give_the_same_loss_and_gradients(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator(GPU).manual_seed(0)
    hidden = torch.randn(3000, 576, device=GPU, generator=generator).to(dtype).requires_grad_()
    weights = torch.full((1, 3000), 0.7, device=GPU)
    weights[0, ::3] = 0
    head = (torch.randn(49152, 576, device=GPU, generator=generator) * 0.05).to(dtype)
    labels = torch.randint(49152, (3000,), device=GPU, generator=generator)
    fused = head_loss([hidden], head, labels, weights)
    (fused_gradient,) = torch.autograd.grad(fused, hidden)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chunked = head_loss([hidden], head, labels, weights)
    (chunked_gradient,) = torch.autograd.grad(chunked, hidden)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert abs(fused - chunked) < tolerance * chunked
    assert (fused_gradient - chunked_gradient).norm() < tolerance * chunked_gradient.norm()


@pytest.mark.parametrize("use_parent", [False, True])
@pytest.mark.parametrize("shares", [LossShares(), LossShares(0.3, 0.3)])
def test_the_objective_on_the_gpu_equals_the_cpu(shares: LossShares, use_parent: bool) -> None:
    config = DraftConfig(
        window=40, max_lag=4, cross_layers=(0, -1), use_feature=True, final_norm=True, lag_gate=True,
        use_parent=use_parent,
    )  # fmt: skip
    size = {"vocab_size": 300, "hidden_size": 128, "head_dim": 64}
    chance = np.random.default_rng(0)
    roles = np.full(256, Role.TEXT, np.uint8)
    roles[20:70] = roles[200:230] = Role.PROMPT
    rows = [
        Packed(chance.integers(0, 300, 256), roles, np.array(starts, np.int32))
        for starts in ([0], [0, 100, 103])
    ]
    found = []
    for device, dtype in ((torch.device("cpu"), torch.float32), (GPU, torch.float32), (GPU, torch.bfloat16)):
        target = tiny_target(**size).to(device=device, dtype=dtype)
        draft = GlideDraft(target.config, config)
        draft.initialise(torch.Generator().manual_seed(1), std=0.05)
        draft.to(device=device, dtype=dtype)
        lags = [(1, 1), (2, 2), (3, 3)] if use_parent else [(3, 1)]
        layout = lay_out(collate(rows, "long", True), lags, [0, 60], 4, head_rows(None, 300), device)
        outcome = Objective(target, draft, shares, lag_decay=0.7)(layout)
        outcome.loss.backward()
        weights = dict(draft.named_parameters())
        gradients = torch.cat([weights[name].grad.float().cpu().flatten() for name in sorted(weights)])  # type: ignore[union-attr]
        found.append((float(outcome.loss.detach()), gradients))
    (loss, gradients), (gpu_loss, gpu_gradients), (half_loss, half_gradients) = found
    assert abs(gpu_loss - loss) < 1e-4 * loss
    assert (gpu_gradients - gradients).norm() < 1e-3 * gradients.norm()
    assert abs(half_loss - loss) < 0.02 * loss
    assert (half_gradients - gradients).norm() < 0.1 * gradients.norm()
