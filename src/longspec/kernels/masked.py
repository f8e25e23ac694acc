"""Attention of a tree's nodes to the draft's ring and to their own ancestors, which are stored after it."""

from __future__ import annotations

from typing import NamedTuple

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
    parts_like,
    query_offsets,
    results_like,
    score_scale,
    write_rows,
)
from longspec.kernels.launch import await_turn, launched, overlap
from longspec.kernels.tiling import choose_share, choose_slice, precision


@triton.jit
def _visible(
    held, parents, row, entry, position, num_rows, num_keys, group, first_node, depth, window
):  # fmt: skip
    """Which entries the rows of nodes at `depth` and `position` see: ring entries of the last `window`
    positions, and after the ring the nodes themselves and their ancestors. The root is in the ring."""
    back = position - tl.load(held + entry, mask=entry < num_keys, other=-1)
    visible = (back >= 0) & (back < window) & (back <= position) & (entry < window)
    visible = visible[None, :] & (row < num_rows)[:, None]
    here = (first_node + row // group).to(tl.int64)
    for _ in tl.range(0, depth):
        visible = visible | (entry[None, :] == window + here[:, None])
        here = tl.load(parents + here, mask=row < num_rows, other=0)
    return visible


@launched
@triton.jit(
    do_not_specialize=[
        "num_rows", "num_keys", "share", "heads", "group", "first_node", "depth", "window", "held_b",
        "parents_b",
    ]
)  # fmt: skip
def _masked_kernel(
    q, k, v, held, lengths, parents, part_out, part_lse, out, lse,
    q_b, q_t, q_h, k_b, k_h, k_s, v_b, v_h, v_s, held_b, parents_b,
    num_rows, num_keys, share, heads, group, first_node, depth, window, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One part of `share` keys; with WHOLE it is the only one."""
    tile, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, head = problem // heads, problem % heads
    row, d = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    split = tl.program_id(2)
    start, stop = split * share, tl.minimum((split + 1) * share, num_keys)
    entry = start + tl.arange(0, BLOCK_S)
    held += b * held_b
    parents += b * parents_b
    # What nodes see was known before their queries were computed, so it is read before the turn.
    position = tl.load(lengths + b) + depth
    visible = _visible(
        held, parents, row, entry, position, num_rows, num_keys, group, first_node, depth, window
    )  # fmt: skip
    await_turn(OVERLAP)
    inside = (row < num_rows)[:, None] & (d < D)[None, :]
    rows_at = q + b * q_b + query_offsets(row, head, q_t, q_h, group)
    query = tl.load(rows_at[:, None] + d[None, :], mask=inside, other=0.0)
    k += b * k_b + head * k_h
    v += b * v_b + head * v_h
    high = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for first in tl.range(start, stop, BLOCK_S):
        entry = first + tl.arange(0, BLOCK_S)
        mask = (entry < num_keys)[:, None] & (d < D)[None, :]
        key = tl.load(k + (entry * k_s)[:, None] + d[None, :], mask=mask, other=0.0)
        value = tl.load(v + (entry * v_s)[:, None] + d[None, :], mask=mask, other=0.0)
        high, total, acc = absorb(query, key, value, visible, high, total, acc, scale, PRECISION, True)
        if first + BLOCK_S < stop:
            entry += BLOCK_S
            visible = _visible(
                held, parents, row, entry, position, num_rows, num_keys, group, first_node, depth, window
            )  # fmt: skip
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
    D: tl.constexpr, BLOCK_R: tl.constexpr, SLICE: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge SLICE numbers of each head's parts by their lse."""
    await_turn(OVERLAP)
    tile, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, d = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    high = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, SLICE], tl.float32)
    for first in tl.range(0, num_parts, PARTS):
        at = problem * num_parts
        lses, outs = load_parts(part_out, part_lse, first, num_parts, at, row, num_rows, d, D, PARTS)
        high, total, acc = absorb_parts(lses, outs, high, total, acc)
    b, head = problem // heads, problem % heads
    write_rows(out, lse, b, head, row, d, high, total, acc, num_rows, heads, group, D)


class Nodes(NamedTuple):
    """Nodes of one depth of a draft's tree. Their keys and values are after the draft's ring; the root's are
    in it."""

    held: Tensor
    """The position that each entry of the ring holds, int64 [B, S]."""
    window: int
    """The number of entries of the ring; the tree's nodes come after them."""
    lengths: Tensor
    """Of the prefix, [B]."""
    parents: Tensor
    """Of the tree's nodes, int64 [B, N]."""
    first: int
    """The number of the first of these nodes in the tree."""
    depth: int


def masked(q: Tensor, k: Tensor, v: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Queries q [B, T, H, D] of a tree's nodes over the entries of a ring k, v [B, K, S, D] that they see.

    An earlier kernel than the one that wrote q must have written the tensors of `nodes`, because they are
    read before the turn (`longspec.kernels.launch`).
    """
    B, T, H, D = q.shape
    K, num_keys = k.shape[1], k.shape[2]
    num_rows = T * H // K
    out, lse = results_like(q)
    block = 16 if q.dtype == torch.float32 else 128 if D <= 128 else 64
    grid = (triton.cdiv(num_rows, MERGE_ROWS), B * K)
    share, num_splits = choose_share(grid[0] * grid[1], num_keys, block, q.device)
    whole = num_splits == 1
    part_out, part_lse = parts_like(q, 0 if whole else num_splits)
    shape = {"D": D, "BLOCK_R": MERGE_ROWS, "num_warps": 4, **overlap(q.device)}
    _masked_kernel[(*grid, num_splits)](
        q, k, v, nodes.held, nodes.lengths, nodes.parents, part_out, part_lse, out, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], nodes.held.stride(0), nodes.parents.stride(0),
        num_rows, num_keys, share, K, H // K, nodes.first, nodes.depth, nodes.window, score_scale(D),
        BLOCK_D=padded(D), BLOCK_S=block, WHOLE=whole, PRECISION=precision(q.dtype), num_stages=2, **shape,
    )  # fmt: skip
    if not whole:
        piece, parts = choose_slice(num_rows, grid[0] * grid[1], q.device)
        _join_kernel[(*grid, triton.cdiv(D, piece))](
            part_out, part_lse, out, lse, num_rows, num_splits, K, H // K, SLICE=piece, PARTS=parts, **shape
        )  # fmt: skip
    return out, lse
