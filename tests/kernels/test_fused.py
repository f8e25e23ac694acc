"""The small fused kernels against the same in plain torch, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from longspec.config import RopeConfig
from longspec.kernels.commit import commit_path
from longspec.kernels.norm import add_rms_norm, rms_norm
from longspec.kernels.rope import rope_write
from longspec.kernels.silu import silu_mul
from longspec.models.rope import RopeTable, rotate
from tests.kernels.paged import DEVICE, DTYPES, places, random_tables

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
@pytest.mark.parametrize(("normed", "paged"), [(False, False), (True, True)])
def test_rope_writes_into_ring_and_pages(
    dtype: torch.dtype, H: int, K: int, D: int, normed: bool, paged: bool
) -> None:
    torch.manual_seed(D)
    B, T, S = 2, 5, 40
    rope = RopeTable(RopeConfig(), D).to(DEVICE)
    rope.reserve(100)
    qkv = torch.randn(B, T, (H + 2 * K) * D, device=DEVICE).to(dtype)
    positions, entries = (torch.randint(60, (B, T), device=DEVICE), torch.randperm(S)[: B * T].view(B, T))
    entries = entries.to(DEVICE)
    # One layer of pages that all rows share, or the first rows of a larger ring.
    shape = (3, K, S, D) if paged else (B + 1, K, S, D)
    keys, values = (torch.zeros(shape, device=DEVICE, dtype=dtype) for _ in range(2))
    keys, values = (part[1] if paged else part[:B] for part in (keys, values))
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
    written = [part.transpose(0, 1)[entries] if paged else part[rows, :, entries] for part in (keys, values)]
    close(written[0], rotate(true_k, cos, sin), dtype)
    close(written[1], true_v, dtype)
    assert int((keys.abs().sum((-3, -1)) > 0).sum()) == B * T, "nothing else was written"


@pytest.mark.parametrize("P", [1, 3, 17])
def test_commit_moves_the_path(P: int) -> None:
    generator = torch.Generator().manual_seed(P)
    L, B, K, D, page = 3, 4, 2, 48, 16
    lengths = [0, 15, 7, 30]
    tables, num_pages = random_tables([length + 2 * P for length in lengths], page, generator)
    keys, values = torch.randn(2, L, K, num_pages * page, D, generator=generator).to(DEVICE).unbind(0)
    before = keys.clone(), values.clone()
    # Overlapping: one node's goal is where another comes from, often in another page.
    path = torch.stack([torch.randperm(2 * P, generator=generator)[:P].sort().values for _ in range(B)])
    path[:, 0] = 0
    kept = [P, max(1, P - 1), 1, 0]
    commit_path(
        keys,
        values,
        torch.tensor(lengths, device=DEVICE),
        tables,
        page,
        path.to(DEVICE),
        torch.tensor(kept, device=DEVICE),
    )
    for part, old in zip((keys, values), before, strict=True):
        expected = old.clone()
        for row, (length, num) in enumerate(zip(lengths, kept, strict=True)):
            at = places(tables, row, length + 2 * P, page)
            goals, sources = at[length : length + num], at[length + path[row, :num].to(DEVICE)]
            expected[:, :, goals] = old[:, :, sources]
        assert torch.equal(part, expected)
