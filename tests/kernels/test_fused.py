"""The small fused kernels against the same in plain torch, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from longspec.cache import KVCache
from longspec.config import RopeConfig
from longspec.kernels.commit import commit_path
from longspec.kernels.norm import add_rms_norm, rms_norm
from longspec.kernels.rope import rope_write
from longspec.kernels.silu import silu_mul
from longspec.models.rope import RopeTable, rotate

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Triton's interpreter, which runs without a GPU, is silently wrong for bf16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def close(one: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert one.dtype == dtype
    torch.testing.assert_close(one.double(), exact.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [48, 576, 4096])
def test_norm_with_residual(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    x, residual = (torch.randn(2, 3, size, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(size, device=DEVICE).to(dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, F.rms_norm(total.double(), (size,), weight.double(), 1e-5), dtype)
    close(rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (size,), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = 3 * torch.randn(2, 5, 2 * 1537, device=DEVICE).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    close(silu_mul(gate_up), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("H", "K", "D"), [(9, 3, 64), (4, 4, 96), (14, 2, 128)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_writes_into_the_cache(dtype: torch.dtype, H: int, K: int, D: int, normed: bool) -> None:
    torch.manual_seed(D)
    B, T, S = 2, 5, 40
    rope = RopeTable(RopeConfig(), D).to(DEVICE)
    rope.reserve(100)
    qkv = torch.randn(B, T, (H + 2 * K) * D, device=DEVICE).to(dtype)
    positions, entries = (torch.randint(60, (B, T), device=DEVICE), torch.randperm(S)[: B * T].view(B, T))
    entries = entries.to(DEVICE)
    # a layer of a larger cache
    keys, values = (torch.zeros(3, B, K, S, D, device=DEVICE, dtype=dtype)[1] for _ in range(2))
    weights = [torch.randn(D, device=DEVICE).to(dtype) for _ in range(2)]
    norm = (weights[0], weights[1], 1e-6) if normed else None
    q = rope_write(qkv, rope.table, positions, entries, keys, values, norm)
    heads = qkv.double().view(B, T, -1, D)
    true_q, true_k, true_v = heads.split((H, K, K), 2)
    if normed:
        true_q = F.rms_norm(true_q, (D,), weights[0].double(), 1e-6)
        true_k = F.rms_norm(true_k, (D,), weights[1].double(), 1e-6)
    cos, sin = (table.double() for table in rope(positions))
    close(q, rotate(true_q, cos, sin), dtype)
    rows = torch.arange(B, device=DEVICE)[:, None]
    close(keys[rows, :, entries], rotate(true_k, cos, sin), dtype)
    close(values[rows, :, entries], true_v, dtype)
    assert int((keys.abs().sum((1, 3)) > 0).sum()) == B * T, "nothing else was written"


@pytest.mark.parametrize("P", [1, 3, 17])
def test_commit_moves_the_path(P: int) -> None:
    torch.manual_seed(P)
    L, B, K, S, D = 3, 4, 2, 90, 48
    cache, expected = (
        KVCache(torch.empty(0), torch.empty(0), torch.tensor([0, 50, 7, 20], device=DEVICE)) for _ in range(2)
    )
    cache.keys, cache.values = (torch.randn(L, B, K, S, D, device=DEVICE) for _ in range(2))
    expected.keys, expected.values = cache.keys.clone(), cache.values.clone()
    # overlapping: a node's place is where another one comes from
    path = torch.stack([torch.randperm(2 * P)[:P].sort().values for _ in range(B)]).to(DEVICE)
    path[:, 0] = 0
    num_kept = torch.tensor([P, max(1, P - 1), 1, 0], device=DEVICE)
    expected.commit(path, num_kept)
    commit_path(cache.keys, cache.values, cache.lengths, path, num_kept)
    cache.advance(num_kept)
    for row, length in enumerate(expected.lengths.tolist()):
        for one, other in ((cache.keys, expected.keys), (cache.values, expected.values)):
            assert torch.equal(one[:, row, :, :length], other[:, row, :, :length])
