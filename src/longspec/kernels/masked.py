"""Attention of a few queries to few keys, each with a mask of its own: a draft to its ring and its tree."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.attention import (
    MERGE_ROWS,
    absorb,
    absorb_parts,
    load_parts,
    padded,
    query_offsets,
    results_like,
    score_scale,
    write_rows,
)
from longspec.kernels.launch import await_turn, launched, overlap
from longspec.kernels.tiling import choose_share, precision


@launched
@triton.jit(do_not_specialize=["num_rows", "num_keys", "share", "heads", "group"])
def _masked_kernel(
    q, k, v, sees, part_out, part_lse, out, lse,
    q_b, q_t, q_h, k_b, k_h, k_s, v_b, v_h, v_s, sees_b, sees_t,
    num_rows, num_keys, share, heads, group, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One part of `share` keys; with WHOLE it is the only one."""
    await_turn(OVERLAP)
    tile, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, head = problem // heads, problem % heads
    row, d = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    inside = (row < num_rows)[:, None] & (d < D)[None, :]
    rows_at = q + b * q_b + query_offsets(row, head, q_t, q_h, group)
    query = tl.load(rows_at[:, None] + d[None, :], mask=inside, other=0.0)
    k += b * k_b + head * k_h
    v += b * v_b + head * v_h
    sees += b * sees_b
    high = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    split = tl.program_id(2)
    for first in tl.range(split * share, tl.minimum((split + 1) * share, num_keys), BLOCK_S):
        entry = first + tl.arange(0, BLOCK_S)
        pairs = (row < num_rows)[:, None] & (entry < num_keys)[None, :]
        sees_at = sees + (row // group * sees_t)[:, None] + entry[None, :]
        visible = tl.load(sees_at, mask=pairs, other=0) != 0
        mask = (entry < num_keys)[:, None] & (d < D)[None, :]
        key = tl.load(k + (entry * k_s)[:, None] + d[None, :], mask=mask, other=0.0)
        value = tl.load(v + (entry * v_s)[:, None] + d[None, :], mask=mask, other=0.0)
        high, total, acc = absorb(query, key, value, visible, high, total, acc, scale, PRECISION, True)
    if WHOLE:
        write_rows(out, lse, b, head, row, d, high, total, acc, num_rows, heads, group, D)
    else:
        place = (problem * tl.num_programs(2) + split) * num_rows + row
        result = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(part_out + place[:, None] * D + d[None, :], result, mask=inside)
        tl.store(part_lse + place, high + tl.log2(total), mask=row < num_rows)


@launched
@triton.jit(do_not_specialize=["num_rows", "num_parts", "heads", "group"])
def _join_kernel(
    part_out, part_lse, out, lse, num_rows, num_parts, heads, group,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge parts by their lse."""
    await_turn(OVERLAP)
    tile, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, d = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    high = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for first in tl.range(0, num_parts, PARTS):
        at = problem * num_parts
        lses, outs = load_parts(part_out, part_lse, first, num_parts, at, row, num_rows, d, D, PARTS)
        high, total, acc = absorb_parts(lses, outs, high, total, acc)
    b, head = problem // heads, problem % heads
    write_rows(out, lse, b, head, row, d, high, total, acc, num_rows, heads, group, D)


def masked(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Queries q [B, T, H, D] over the keys of k, v [B, K, S, D] that `sees`, bool [B, T, S], allows each."""
    B, T, H, D = q.shape
    K, num_keys = k.shape[1], k.shape[2]
    num_rows = T * H // K
    out, lse = results_like(q)
    sees = sees.contiguous().view(torch.uint8)
    block = 16 if q.dtype == torch.float32 else 128 if D <= 128 else 64
    grid = (triton.cdiv(num_rows, MERGE_ROWS), B * K)
    share, num_splits = choose_share(grid[0] * grid[1], num_keys, block, q.device)
    whole = num_splits == 1
    num_parts = 0 if whole else B * K * num_splits * num_rows
    part_out = torch.empty(num_parts, D, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(num_parts, dtype=torch.float32, device=q.device)
    shape = {"D": D, "BLOCK_D": padded(D), "BLOCK_R": MERGE_ROWS, "num_warps": 4, **overlap(q.device)}
    _masked_kernel[(*grid, num_splits)](
        q, k, v, sees, part_out, part_lse, out, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], T * num_keys, num_keys,
        num_rows, num_keys, share, K, H // K, score_scale(D),
        BLOCK_S=block, WHOLE=whole, PRECISION=precision(q.dtype), num_stages=2, **shape,
    )  # fmt: skip
    if not whole:
        _join_kernel[grid](part_out, part_lse, out, lse, num_rows, num_splits, K, H // K, PARTS=8, **shape)
    return out, lse
