"""Attention whose result for a query depends on its text alone: not on what is computed at the same time.

In half precision sums differ with the order of their terms. Here the order follows from positions, not from
how many nodes, rows or programs there are, nor from where the prefix ends and the nodes begin:

- A query's keys are its old keys and its recent keys. Old keys are all before the border, which is 32 to 63
  keys before the query; with a tree of depth 31 or less they are in the prefix for every node. Tiles and
  parts of old keys begin at fixed positions. A key that a query does not count has weight 0, which changes no
  bit.
- Recent keys, the last 32 to 63, are gathered in the order of positions: from the prefix, then from the
  nodes on the path to the query, wherever these stand.
- The sum of the weights is a product with ones on the tensor cores, because there the order of additions does
  not depend on the number of queries in a tile. With `tl.sum` it does.
- Parts are merged one after the other. The multiplications and additions of a merge are explicit, so that the
  compiler does not fuse them in one way here and in another there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longspec.kernels.attention import (
    padded,
    query_offsets,
    results_like,
    score_scale,
    tile_at,
    weigh,
    write_rows,
)
from longspec.kernels.launch import await_turn, fetch, launched, overlap
from longspec.kernels.pages import check_tables, place_of
from longspec.kernels.tiling import choose_tiling, copies_tiles, precision

DEEPEST = 31
"""The depth of trees for which recent keys suffice. A chain may be longer: its keys stand in order."""
_RECENT = tl.constexpr(64)
# A text of 4,096 tokens or more has 16 to 32 parts.
_MOST_PARTS, _LEAST_SHARE = 32, tl.constexpr(256)
# The tile size is chosen for this many folded rows, however many there are.
_MANY_ROWS = 256
# Tiles of fewer rows are multiplied by another instruction, and over fp8 the compiler gives that one the
# numbers of a key in another order. So there all tiles have at least so many rows.
_LEAST_ROWS = 64
# Columns of ones, of which `tl.dot` needs some; all columns of the product are the same sum.
_ONES = tl.constexpr(8)
# Parts that are loaded at a time.
_AT_ONCE = 4


class Paths(NamedTuple):
    """Where the queries stand in their texts and in their trees."""

    positions: Tensor
    """int64 [B, T]"""
    nodes: Tensor
    """The nodes on the way from the root to each query's node, int64 [B, T, depth + 1]."""


def chain_paths(positions: Tensor) -> Paths:
    """Of tokens [B, T] that follow each other."""
    nodes = torch.arange(positions.shape[1], device=positions.device)
    return Paths(positions, nodes.expand(*positions.shape, -1))


@triton.jit
def _border(position):
    """How many keys are old for a query at this position."""
    return tl.maximum(position - 31, 0) // 32 * 32


@triton.jit
def _share(position):
    """Keys of a part, for a query at this position: it doubles where the position does."""
    exponent = (position.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    doublings = tl.maximum(exponent - 12, 0)
    return (doublings * 0 + _LEAST_SHARE) << doublings


@triton.jit
def _absorb(
    q, k, v, visible, high, totals, acc, scale, PRECISION: tl.constexpr, MASKED: tl.constexpr
) -> tl.tuple:  # fmt: skip
    """As `longspec.kernels.attention.absorb`; of `totals` [R, _ONES] all columns are the sum of weights."""
    high, weights, fade = weigh(q, k, visible, high, scale, PRECISION, MASKED)
    weights = weights.to(q.dtype)
    ones = tl.full([k.shape[0], _ONES], 1.0, q.dtype)
    totals = tl.dot(weights, ones, totals * fade[:, None], input_precision=PRECISION)
    acc = tl.dot(weights, v.to(q.dtype), acc * fade[:, None], input_precision=PRECISION)
    return high, totals, acc


@triton.jit
def _merge(high, total, acc, other_high, other_total, other_acc) -> tl.tuple:
    """Two results as one. One that saw nothing changes no bit of the other."""
    higher = tl.maximum(high, other_high)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    fade, other_fade = tl.exp2(high - base), tl.exp2(other_high - base)
    total = tl.fma(total, fade, other_total * other_fade)
    acc = tl.fma(acc, fade[:, None].broadcast_to(acc.shape), other_acc * other_fade[:, None])
    return higher, total, acc


@launched
@triton.jit(do_not_specialize=["num_rows", "num_queries", "num_parts", "depth", "heads", "group", "tables_b"])
def _old_kernel(
    q, k, v, keys, values, positions, lengths, tables, part_acc, part_sums, q_b, q_t, q_h, k_h, k_s, v_h, v_s,
    tables_b, num_rows, num_queries, num_parts, depth, heads, group, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, LINE: tl.constexpr, BOXES: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One part of the old keys. Where a tree's queries have two sizes of parts, one size after the other."""
    tile, part, problem = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = problem // heads, problem % heads
    first_position = tl.load(lengths + b).to(tl.int32)
    lowest, highest = _share(first_position), _share(first_position + depth)
    furthest = _border(first_position + depth)
    last = tl.maximum(furthest - 1, 0)
    tables += b.to(tl.int64) * tables_b
    keys += head.to(tl.int64) * k_h
    values += head.to(tl.int64) * v_h
    if OVERLAP:
        # Earlier kernels wrote the old keys, so the first tile can be fetched while the queries are computed.
        number = tl.load(tables + tl.minimum(part * lowest, last) // PAGE)
        place = number.to(tl.int64) * PAGE + part * lowest % PAGE + tl.arange(0, BLOCK_S)
        line = tl.arange(0, BLOCK_D // LINE) * LINE
        fetch(keys + (place * k_s)[:, None] + line[None, :], OVERLAP)
        fetch(values + (place * v_s)[:, None] + line[None, :], OVERLAP)
    row, d = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    position = tl.load(positions + b * num_queries + row // group, mask=row < num_rows, other=0).to(tl.int32)
    border, share = _border(position), _share(position)
    await_turn(OVERLAP)
    if part * lowest >= furthest:
        return
    inside = (row < num_rows)[:, None] & (d < D)[None, :]
    rows_at = q + b.to(tl.int64) * q_b + query_offsets(row, head, q_t, q_h, group)
    query = tl.load(rows_at[:, None] + d[None, :], mask=inside, other=0.0)
    at = (problem.to(tl.int64) * num_parts + part) * num_rows + row
    size = lowest
    while size <= highest:
        start = part * size
        end = tl.minimum(start + size, furthest)
        high = tl.full([BLOCK_R], -float("inf"), tl.float32)
        totals = tl.zeros([BLOCK_R, _ONES], tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        # Up to here all queries count all keys.
        edge = tl.maximum(tl.minimum(_border(first_position) // BLOCK_S * BLOCK_S, end), start)
        page = tl.load(tables + tl.minimum(start, last) // PAGE)
        for first in tl.range(start, edge, BLOCK_S):
            tile_place = page * PAGE + first % PAGE
            # Load the page number of the next tile now, so that the next iteration does not wait for it.
            page = tl.load(tables + tl.minimum(first + BLOCK_S, last) // PAGE)
            key = tile_at(k, keys, k_s, 0, head, tile_place, row, D, BLOCK_D, BLOCK_S, BOXES, False)
            value = tile_at(v, values, v_s, 0, head, tile_place, row, D, BLOCK_D, BLOCK_S, BOXES, False)
            high, totals, acc = _absorb(query, key, value, row, high, totals, acc, scale, PRECISION, False)
        for first in tl.range(edge, end, BLOCK_S):
            tile_place = tl.load(tables + first // PAGE) * PAGE + first % PAGE
            key = tile_at(k, keys, k_s, 0, head, tile_place, row, D, BLOCK_D, BLOCK_S, BOXES, False)
            value = tile_at(v, values, v_s, 0, head, tile_place, row, D, BLOCK_D, BLOCK_S, BOXES, False)
            entry = first + tl.arange(0, BLOCK_S)
            # Entries behind the prefix may be nan, which a weight of 0 would let through.
            value = tl.where((entry < furthest)[:, None], value.to(query.dtype), 0.0)
            visible = entry[None, :] < border[:, None]
            high, totals, acc = _absorb(query, key, value, visible, high, totals, acc, scale, PRECISION, True)
        ours = (row < num_rows) & (share == size) & (start < border)
        tl.store(part_acc + at[:, None] * D + d[None, :], acc, mask=ours[:, None] & (d < D)[None, :])
        tl.store(part_sums + 2 * at, high, mask=ours)
        tl.store(part_sums + 2 * at + 1, tl.max(totals, 1), mask=ours)
        size *= 2


@launched
@triton.jit(do_not_specialize=["num_rows", "num_queries", "num_parts", "depth", "heads", "group", "tables_b"])
def _recent_kernel(
    q, k, v, positions, nodes, lengths, tables, part_acc, part_sums, out, lse,
    q_b, q_t, q_h, k_h, k_s, v_h, v_s, tables_b, nodes_b, nodes_t,
    num_rows, num_queries, num_parts, depth, heads, group, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, PARTS: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One query's result: from the recent keys, while the other launch runs, and then from the parts of the
    old ones."""
    t, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, head = problem // heads, problem % heads
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    row = tl.where(g < group, t * group + g, num_rows)
    rows_at = q + b * q_b + query_offsets(row, head, q_t, q_h, group)
    wanted = (row < num_rows)[:, None] & (d < D)[None, :]
    query = tl.load(rows_at[:, None] + d[None, :], mask=wanted, other=0.0)
    position = tl.load(positions + b * num_queries + t).to(tl.int32)
    length = tl.load(lengths + b).to(tl.int32)
    border, share = _border(position), _share(position)
    key_position = border + tl.arange(0, _RECENT)
    visible = key_position <= position
    level = key_position - length
    node = tl.load(nodes + b * nodes_b + t * nodes_t + level, mask=visible & (level >= 0), other=0)
    entry = tl.where(level >= 0, length + node.to(tl.int32), key_position)
    place = place_of(tables + b * tables_b, entry, visible, PAGE)
    mask = visible[:, None] & (d < D)[None, :]
    key = tl.load(k + head * k_h + (place * k_s)[:, None] + d[None, :], mask=mask, other=0.0)
    value = tl.load(v + head * v_h + (place * v_s)[:, None] + d[None, :], mask=mask, other=0.0)
    high = tl.full([BLOCK_G], -float("inf"), tl.float32)
    totals = tl.zeros([BLOCK_G, _ONES], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    high, totals, acc = _absorb(
        query, key, value, visible[None, :], high, totals, acc, scale, PRECISION, True
    )  # fmt: skip
    total = tl.max(totals, 1)
    await_turn(OVERLAP)
    count = tl.cdiv(border, share)
    for first in tl.range(0, count, PARTS):
        for part in tl.static_range(PARTS):
            there = (row < num_rows) & (first + part < count)
            at = (problem * num_parts + first + part) * num_rows + row
            part_high = tl.load(part_sums + 2 * at, mask=there, other=-float("inf"))
            part_total = tl.load(part_sums + 2 * at + 1, mask=there, other=0.0)
            numbers = there[:, None] & (d < D)[None, :]
            part_result = tl.load(part_acc + at[:, None] * D + d[None, :], mask=numbers, other=0.0)
            high, total, acc = _merge(high, total, acc, part_high, part_total, part_result)
    write_rows(out, lse, b, head, row, d, high, total, acc, num_rows, heads, group, D)


def attend_exactly(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, tables: Tensor, page: int, paths: Paths
) -> tuple[Tensor, Tensor]:
    """As `longspec.kernels.attention.attend` of a chain, or of a tree that is at most DEEPEST deep, whose
    nodes stand right behind the prefix. The kernel launched right before must not write `paths`, because they
    are read while it runs."""
    B, T, H, D = q.shape
    K, num_rows = k.shape[0], T * H // k.shape[0]
    check_tables(tables, page)
    # The interpreter has one tile for any number of rows: the bits of numpy's products depend on it.
    many = max(num_rows, _LEAST_ROWS if k.dtype != q.dtype else 1) if q.is_cuda else _MANY_ROWS
    tiling = choose_tiling(many, D, q.dtype, q.device)
    # Of the same size whatever the queries, because at each tile what was summed is scaled again.
    block = min(choose_tiling(_MANY_ROWS, D, q.dtype, q.device).num_keys, page)
    num_parts = min(_MOST_PARTS, triton.cdiv(tables.shape[1] * page, _LEAST_SHARE.value))
    num_results = num_parts * B * T * H
    part_acc, part_sums = (q.new_empty(num_results, size, dtype=torch.float32) for size in (D, 2))
    out, lse = results_like(q)
    width = padded(D)
    shape = {"D": D, "BLOCK_D": width, "PAGE": page, "PRECISION": precision(q.dtype)}
    boxes, box = copies_tiles(q.device), [1, 1, block, width]
    tiles = (TensorDescriptor.from_tensor(part[None], box) if boxes else part for part in (k, v))
    strides = (*q.stride()[:3], *k.stride()[:2], *v.stride()[:2], tables.stride(0))
    positions, nodes = paths.positions.contiguous(), paths.nodes
    sizes = (num_rows, T, num_parts, nodes.shape[2] - 1, K, H // K, score_scale(D))
    _old_kernel[(triton.cdiv(num_rows, tiling.num_rows), num_parts, B * K)](
        q, *tiles, k, v, positions, lengths, tables, part_acc, part_sums, *strides, *sizes, **shape,
        BLOCK_R=tiling.num_rows, BLOCK_S=block, LINE=min(width, 128 // k.itemsize), BOXES=boxes,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **overlap(q.device),
    )  # fmt: skip
    _recent_kernel[(T, B * K)](
        q, k, v, positions, nodes, lengths, tables, part_acc, part_sums, out, lse,
        *strides, *nodes.stride()[:2], *sizes, **shape,
        BLOCK_G=max(16, triton.next_power_of_2(H // K)), PARTS=_AT_ONCE,
        num_warps=4, num_stages=1, **overlap(q.device),
    )  # fmt: skip
    return out, lse
