"""Attention that gives a query the same bits whatever is computed beside it, in two launches.

Sums of floats depend on their order. So here the order follows from the query's position p alone: not from
how many nodes, rows or programs there are, nor from where the prefix ends and the tree begins.

- Old keys, those before `border(p)`, are in the prefix whatever tree the query is in. They are taken in tiles
  that begin at multiples of their size, in parts of `share(p)` keys. Queries of one tree may differ in both;
  a key that a query does not count has weight 0, which changes no bit.
- Recent keys, the last 32 to 63, are gathered in the order of positions: from the prefix, then from the
  nodes on the path to the query, wherever these stand.
- The sum of the weights is a product with ones on the tensor cores, because there the order of additions does
  not depend on the number of queries in a tile. With `tl.sum` it does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longspec.kernels.attention import (
    absorb,
    absorb_parts,
    load_parts,
    padded,
    parts_like,
    query_offsets,
    results_like,
    score_scale,
    tile_at,
    write_rows,
)
from longspec.kernels.launch import await_turn, launched, overlap
from longspec.kernels.pages import check_tables, place_of
from longspec.kernels.tiling import choose_tiling, copies_tiles, precision

DEEPEST = 31
"""The depth of trees for which recent keys suffice. A chain may be longer: its keys stand in order."""
_RECENT = tl.constexpr(64)
# A text of 4,096 tokens or more has 16 to 32 parts.
_MOST_PARTS, _LEAST_SHARE = 32, tl.constexpr(256)
# The tile size is chosen for this many folded rows, however many there are.
_MANY_ROWS = 256
# Parts that are merged at a time, and numbers of a head's result that one program has.
_AT_ONCE, _SLICE = 16, 64


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
    """As `longspec.kernels.attention.absorb`; of `totals` [R, 16] all columns are the sum of weights."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    higher = tl.maximum(high, tl.max(scores, 1) * scale)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp2(scores * scale - base[:, None]).to(v.dtype)
    fade = tl.exp2(high - base)[:, None]
    ones = tl.full([k.shape[0], 16], 1.0, v.dtype)
    totals = tl.dot(weights, ones, totals * fade, input_precision=PRECISION)
    acc = tl.dot(weights, v, acc * fade, input_precision=PRECISION)
    return higher, totals, acc


@launched
@triton.jit(do_not_specialize=["num_rows", "num_queries", "num_parts", "depth", "heads", "group", "tables_b"])
def _old_kernel(
    q, k, v, keys, values, positions, lengths, tables, part_out, part_lse, q_b, q_t, q_h, k_h, k_s, v_h, v_s,
    tables_b, num_rows, num_queries, num_parts, depth, heads, group, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, BOXES: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One part of the old keys. Where a tree's queries have two sizes of parts, one size after the other."""
    tile, part, problem = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = problem // heads, problem % heads
    row, d = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    position = tl.load(positions + b * num_queries + row // group, mask=row < num_rows, other=0).to(tl.int32)
    border, share = _border(position), _share(position)
    first_position = tl.load(lengths + b).to(tl.int32)
    lowest, highest = _share(first_position), _share(first_position + depth)
    furthest = _border(first_position + depth)
    tables += b.to(tl.int64) * tables_b
    keys += head.to(tl.int64) * k_h
    values += head.to(tl.int64) * v_h
    await_turn(OVERLAP)
    if part * lowest >= furthest:
        return
    inside = (row < num_rows)[:, None] & (d < D)[None, :]
    rows_at = q + b.to(tl.int64) * q_b + query_offsets(row, head, q_t, q_h, group)
    query = tl.load(rows_at[:, None] + d[None, :], mask=inside, other=0.0)
    size = lowest
    while size <= highest:
        start = part * size
        end = tl.minimum(start + size, furthest)
        high = tl.full([BLOCK_R], -float("inf"), tl.float32)
        totals = tl.zeros([BLOCK_R, 16], tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        # Up to here all queries count all keys.
        edge = tl.maximum(tl.minimum(_border(first_position) // BLOCK_S * BLOCK_S, end), start)
        for first in tl.range(start, edge, BLOCK_S):
            place = tl.load(tables + first // PAGE) * PAGE + first % PAGE
            key = tile_at(k, keys, k_s, 0, head, place, row, D, BLOCK_D, BLOCK_S, BOXES, False)
            value = tile_at(v, values, v_s, 0, head, place, row, D, BLOCK_D, BLOCK_S, BOXES, False)
            high, totals, acc = _absorb(query, key, value, row, high, totals, acc, scale, PRECISION, False)
        for first in tl.range(edge, end, BLOCK_S):
            place = tl.load(tables + first // PAGE) * PAGE + first % PAGE
            key = tile_at(k, keys, k_s, 0, head, place, row, D, BLOCK_D, BLOCK_S, BOXES, False)
            value = tile_at(v, values, v_s, 0, head, place, row, D, BLOCK_D, BLOCK_S, BOXES, False)
            entry = first + tl.arange(0, BLOCK_S)
            # Entries behind the prefix may be nan, which a weight of 0 would let through.
            value = tl.where((entry < furthest)[:, None], value, 0.0)
            visible = entry[None, :] < border[:, None]
            high, totals, acc = _absorb(query, key, value, visible, high, totals, acc, scale, PRECISION, True)
        total = tl.max(totals, 1)  # all columns are equal
        ours = inside & ((share == size) & (start < border))[:, None]
        place = (problem.to(tl.int64) * num_parts + part) * num_rows + row
        result = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(part_out + place[:, None] * D + d[None, :], result, mask=ours)
        tl.store(part_lse + place, high + tl.log2(total), mask=(share == size) & (row < num_rows))
        size *= 2


@launched
@triton.jit(do_not_specialize=["num_rows", "num_queries", "num_parts", "depth", "heads", "group", "tables_b"])
def _recent_kernel(
    q, k, v, positions, nodes, lengths, tables, part_out, part_lse, out, lse,
    q_b, q_t, q_h, k_h, k_s, v_h, v_s, tables_b, nodes_b, nodes_t,
    num_rows, num_queries, num_parts, depth, heads, group, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, SLICE: tl.constexpr, PARTS: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """SLICE numbers of one query's result: from the recent keys, while the other launch runs, and then from
    the parts of the old ones."""
    t, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, head = problem // heads, problem % heads
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    ours = tl.program_id(2) * SLICE + tl.arange(0, SLICE)
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
    mask = visible[:, None] & (ours < D)[None, :]
    value = tl.load(v + head * v_h + (place * v_s)[:, None] + ours[None, :], mask=mask, other=0.0)
    high = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, SLICE], tl.float32)
    high, total, acc = absorb(
        query, key, value, visible[None, :], high, total, acc, scale, PRECISION, True
    )  # fmt: skip
    await_turn(OVERLAP)
    at, count = problem * num_parts, tl.cdiv(border, share)
    for first in tl.range(0, count, PARTS):
        lses, outs = load_parts(part_out, part_lse, first, count, at, row, num_rows, ours, D, PARTS)
        high, total, acc = absorb_parts(lses, outs, high, total, acc)
    write_rows(out, lse, b, head, row, ours, high, total, acc, num_rows, heads, group, D)


def attend_exactly(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, tables: Tensor, page: int, paths: Paths
) -> tuple[Tensor, Tensor]:
    """As `longspec.kernels.attention.attend` of a chain, or of a tree that is at most DEEPEST deep, whose
    nodes stand right behind the prefix."""
    B, T, H, D = q.shape
    K, num_rows = k.shape[0], T * H // k.shape[0]
    check_tables(tables, page)
    # The interpreter has one tile for any number of rows: the bits of numpy's products depend on it.
    tiling = choose_tiling(num_rows if q.is_cuda else _MANY_ROWS, D, q.dtype, q.device)
    # Of the same size whatever the queries, because at each tile what was summed is scaled again.
    block = min(choose_tiling(_MANY_ROWS, D, q.dtype, q.device).num_keys, page)
    num_parts = min(_MOST_PARTS, triton.cdiv(tables.shape[1] * page, _LEAST_SHARE.value))
    part_out, part_lse = parts_like(q, num_parts)
    out, lse = results_like(q)
    shape = {"D": D, "BLOCK_D": padded(D), "PAGE": page, "PRECISION": precision(q.dtype)}
    boxes, box = copies_tiles(q.device), [1, 1, block, shape["BLOCK_D"]]
    tiles = (TensorDescriptor.from_tensor(part[None], box) if boxes else part for part in (k, v))
    strides = (*q.stride()[:3], *k.stride()[:2], *v.stride()[:2], tables.stride(0))
    positions, nodes = paths.positions.contiguous(), paths.nodes
    sizes = (num_rows, T, num_parts, nodes.shape[2] - 1, K, H // K, score_scale(D))
    _old_kernel[(triton.cdiv(num_rows, tiling.num_rows), num_parts, B * K)](
        q, *tiles, k, v, positions, lengths, tables, part_out, part_lse, *strides, *sizes, **shape,
        BLOCK_R=tiling.num_rows, BLOCK_S=block, BOXES=boxes,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **overlap(q.device),
    )  # fmt: skip
    _recent_kernel[(T, B * K, triton.cdiv(D, _SLICE))](
        q, k, v, positions, nodes, lengths, tables, part_out, part_lse, out, lse,
        *strides, *nodes.stride()[:2], *sizes, **shape,
        BLOCK_G=max(16, triton.next_power_of_2(H // K)), SLICE=_SLICE, PARTS=_AT_ONCE,
        num_warps=4, num_stages=1, **overlap(q.device),
    )  # fmt: skip
    return out, lse
