"""Attention whose result for a query depends on its text alone: not on what is computed at the same time.

In half precision sums differ with the order of their terms. Here the order follows from positions, not from
how many nodes, rows or programs there are, nor from where the prefix ends and the nodes begin:

- A query's keys are its old keys and its recent keys. Old keys are all before the border, which is 32 to 63
  keys before the query; with a tree of depth 31 or less they are in the prefix for every node. Tiles and
  parts of old keys begin at fixed positions. A key that a query does not count has weight 0, which changes no
  bit.
- Recent keys, the last 32 to 63, are gathered in the order of positions: from the prefix, then from the
  nodes on the path to the query, wherever these stand.
- The weights of a tile are summed as integers, because the order of `tl.sum` depends on the number of queries
  in a tile, and only integers have the same sum in every order.
- Parts are merged some at a time, from the first on, pair by pair. The multiplications and additions of a
  merge are explicit, so that the compiler does not fuse them in one way here and in another there.
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
# The tile size is chosen for this many folded rows, however many there are.
_MANY_ROWS = 256
# Tiles of fewer rows are multiplied by another instruction, and over fp8 the compiler gives that one the
# numbers of a key in another order. So there all tiles have at least so many rows.
_LEAST_ROWS = 64
# Rows of a tile of recent keys: the smallest number that `tl.dot` accepts.
_DOT_ROWS = tl.constexpr(16)


class Cut(NamedTuple):
    """How the old keys are cut into parts and the parts are merged."""

    share: int
    """Keys of a part in short texts."""
    most_parts: int
    """Where a text would have more parts, the share doubles, so that it has between half and all of these."""
    at_once: int
    """Parts that are merged at a time, a power of two and at least 2."""
    num_warps: int
    """Of a program that merges: so few that each thread has its numbers of all parts."""


def choose_cut(head_dim: int) -> Cut:
    """The fastest on an H200."""
    return Cut(128, 32, 16, 2) if head_dim <= 64 else Cut(512, 32, 8, 2)


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
def _share(position, LEAST: tl.constexpr, LONG: tl.constexpr):
    """Keys of a part, for a query at this position: from position 2 ** (LONG + 1) on, it doubles where the
    position does."""
    exponent = (position.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    doublings = tl.maximum(exponent - LONG, 0)
    return (doublings * 0 + LEAST) << doublings


@triton.jit
def _weight_sums(weights):
    """Sums of the rows of `weights` [R, S], each between 0 and 1 and rounded to a multiple of 2 ** -23."""
    # 1 + weight has the multiple in its lowest bits.
    multiples = (weights + 1.0).to(tl.int32, bitcast=True) - 0x3F800000
    return tl.sum(multiples, 1).to(tl.float32) * (1.0 / (1 << 23))


@triton.jit
def _absorb(
    q, k, v, visible, high, total, acc, scale, PRECISION: tl.constexpr, MASKED: tl.constexpr
) -> tl.tuple:  # fmt: skip
    """As `longspec.kernels.attention.absorb`."""
    high, weights, fade = weigh(q, k, visible, high, scale, PRECISION, MASKED)
    total = tl.fma(total, fade, _weight_sums(weights))
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision=PRECISION)
    return high, total, acc


@triton.jit
def _first_rows(x, ROWS: tl.constexpr):
    """The first ROWS rows of x [R, D]."""
    rest: tl.constexpr = x.shape[0] // ROWS
    split = tl.reshape(x, [rest, ROWS, x.shape[1]])
    return tl.sum(tl.where((tl.arange(0, rest) == 0)[:, None, None], split, 0.0), 0)


@triton.jit
def _halves(x):
    """The even and the odd ones of x [P, ...]."""
    pairs = tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1], x.shape[2]])
    return tl.split(tl.permute(pairs, (0, 2, 3, 1)))


@triton.jit
def _weighted_sum(x, weights, LEVELS: tl.constexpr):
    """The sum of x times weights, both [P, G, D], over the P = 2 ** LEVELS parts, pair by pair."""
    even, odd = _halves(x)
    even_weights, odd_weights = _halves(weights)
    x = tl.fma(even, even_weights, odd * odd_weights)
    for _ in tl.static_range(LEVELS - 1):
        even, odd = _halves(x)
        x = even + odd
    return tl.reshape(x, [x.shape[1], x.shape[2]])


@triton.jit
def _absorb_parts(high, total, acc, highs, totals, results, LEVELS: tl.constexpr) -> tl.tuple:
    """Add the results of parts, highs and totals [P, G] and results [P, G, D]."""
    higher = tl.maximum(high, tl.max(highs, 0))
    base = tl.where(higher == -float("inf"), 0.0, higher)
    fade, weights = tl.exp2(high - base), tl.exp2(highs - base[None, :])[:, :, None]
    sums = tl.reshape(_weighted_sum(totals[:, :, None], weights, LEVELS), high.shape)
    result = _weighted_sum(results, weights.broadcast_to(results.shape), LEVELS)
    acc = tl.fma(acc, fade[:, None].broadcast_to(acc.shape), result)
    return higher, tl.fma(total, fade, sums), acc


@triton.jit
def _merge(high, total, acc, other_high, other_total, other_acc) -> tl.tuple:
    """Two results as one."""
    higher = tl.maximum(high, other_high)
    fade, other_fade = tl.exp2(high - higher), tl.exp2(other_high - higher)
    total = tl.fma(total, fade, other_total * other_fade)
    acc = tl.fma(acc, fade[:, None].broadcast_to(acc.shape), other_acc * other_fade[:, None])
    return higher, total, acc


@launched
@triton.jit(do_not_specialize=["num_rows", "num_queries", "num_parts", "depth", "heads", "group", "tables_b"])
def _old_kernel(
    q, k, v, keys, values, positions, lengths, tables, part_acc, part_sums, q_b, q_t, q_h, k_h, k_s, v_h, v_s,
    tables_b, num_rows, num_queries, num_parts, depth, heads, group, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    LEAST: tl.constexpr, LONG: tl.constexpr, PAGE: tl.constexpr, LINE: tl.constexpr, BOXES: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One part of the old keys. Where a tree's queries have two sizes of parts, one size after the other."""
    tile, part, problem = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = problem // heads, problem % heads
    first_position = tl.load(lengths + b).to(tl.int32)
    lowest = _share(first_position, LEAST, LONG)
    highest = _share(first_position + depth, LEAST, LONG)
    furthest = _border(first_position + depth)
    last = tl.maximum(furthest - 1, 0)
    # Part 0 waits for its turn before it ends, so that the next kernel does not start too early.
    if (part > 0) & (part * lowest >= furthest):
        return
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
    border, share = _border(position), _share(position, LEAST, LONG)
    await_turn(OVERLAP)
    if furthest == 0:
        return
    inside = (row < num_rows)[:, None] & (d < D)[None, :]
    rows_at = q + b.to(tl.int64) * q_b + query_offsets(row, head, q_t, q_h, group)
    query = tl.load(rows_at[:, None] + d[None, :], mask=inside, other=0.0)
    first_row = (problem.to(tl.int64) * num_parts + part) * num_rows
    part_acc += first_row * D
    part_sums += first_row * 2
    size = lowest
    while size <= highest:
        start = part * size
        end = tl.minimum(start + size, furthest)
        high = tl.full([BLOCK_R], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_R], tl.float32)
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
            high, total, acc = _absorb(query, key, value, row, high, total, acc, scale, PRECISION, False)
        for first in tl.range(edge, end, BLOCK_S):
            tile_place = tl.load(tables + first // PAGE) * PAGE + first % PAGE
            key = tile_at(k, keys, k_s, 0, head, tile_place, row, D, BLOCK_D, BLOCK_S, BOXES, False)
            value = tile_at(v, values, v_s, 0, head, tile_place, row, D, BLOCK_D, BLOCK_S, BOXES, False)
            entry = first + tl.arange(0, BLOCK_S)
            # Entries behind the prefix may be nan, which a weight of 0 would let through.
            value = tl.where((entry < furthest)[:, None], value.to(query.dtype), 0.0)
            visible = entry[None, :] < border[:, None]
            high, total, acc = _absorb(query, key, value, visible, high, total, acc, scale, PRECISION, True)
        # Plus 0, which the compiler does not know. Else it would compute all addresses before the loops, and
        # keep them in registers that the loops need.
        at = row + (size >> 30)
        ours = (at < num_rows) & (share == size) & (start < border)
        tl.store(part_acc + at[:, None] * D + d[None, :], acc, mask=ours[:, None] & (d < D)[None, :])
        tl.store(part_sums + 2 * at, high, mask=ours)
        tl.store(part_sums + 2 * at + 1, total, mask=ours)
        size *= 2


@launched
@triton.jit(do_not_specialize=["num_rows", "num_queries", "num_parts", "depth", "heads", "group", "tables_b"])
def _recent_kernel(
    q, k, v, positions, nodes, lengths, tables, part_acc, part_sums, out, lse,
    q_b, q_t, q_h, k_h, k_s, v_h, v_s, tables_b, nodes_b, nodes_t,
    num_rows, num_queries, num_parts, depth, heads, group, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, PARTS: tl.constexpr,
    LEVELS: tl.constexpr, LEAST: tl.constexpr, LONG: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One query's result: from the recent keys, while the other launch runs, and then from the parts of the
    old ones."""
    t, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, head = problem // heads, problem % heads
    position = tl.load(positions + b * num_queries + t).to(tl.int32)
    length = tl.load(lengths + b).to(tl.int32)
    g, d = tl.arange(0, _DOT_ROWS), tl.arange(0, BLOCK_D)
    rows_at = q + b * q_b + query_offsets(t * group + g, head, q_t, q_h, group)
    query = tl.load(rows_at[:, None] + d[None, :], mask=(g < group)[:, None] & (d < D)[None, :], other=0.0)
    border, share = _border(position), _share(position, LEAST, LONG)
    key_position = border + tl.arange(0, _RECENT)
    visible = key_position <= position
    level = key_position - length
    node = tl.load(nodes + b * nodes_b + t * nodes_t + level, mask=visible & (level >= 0), other=0)
    entry = tl.where(level >= 0, length + node.to(tl.int32), key_position)
    place = place_of(tables + b * tables_b, entry, visible, PAGE)
    mask = visible[:, None] & (d < D)[None, :]
    key = tl.load(k + head * k_h + (place * k_s)[:, None] + d[None, :], mask=mask, other=0.0)
    value = tl.load(v + head * v_h + (place * v_s)[:, None] + d[None, :], mask=mask, other=0.0)
    high, total, acc = _absorb(
        query, key, value, visible[None, :], tl.full([_DOT_ROWS], -float("inf"), tl.float32),
        tl.zeros([_DOT_ROWS], tl.float32), tl.zeros([_DOT_ROWS, BLOCK_D], tl.float32), scale, PRECISION, True,
    )  # fmt: skip
    # Only the rows that exist, so that a part takes few registers and many are loaded at a time.
    recent_high = tl.reshape(_first_rows(high[:, None], BLOCK_G), [BLOCK_G])
    recent_total = tl.reshape(_first_rows(total[:, None], BLOCK_G), [BLOCK_G])
    recent = _first_rows(acc, BLOCK_G)
    high = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    g = tl.arange(0, BLOCK_G)
    row = tl.where(g < group, t * group + g, num_rows)
    await_turn(OVERLAP)
    count = tl.cdiv(border, share)
    for first in tl.range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        there = (part < count)[:, None] & (g < group)[None, :]
        at = (problem * num_parts + part)[:, None] * num_rows + row[None, :]
        highs = tl.load(part_sums + 2 * at, mask=there, other=-float("inf"))
        totals = tl.load(part_sums + 2 * at + 1, mask=there, other=0.0)
        numbers = there[:, :, None] & (d < D)[None, None, :]
        results = tl.load(part_acc + at[:, :, None] * D + d[None, None, :], mask=numbers, other=0.0)
        high, total, acc = _absorb_parts(high, total, acc, highs, totals, results, LEVELS)
    high, total, acc = _merge(high, total, acc, recent_high, recent_total, recent)
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
    cut = choose_cut(D)
    num_parts = min(cut.most_parts, triton.cdiv(tables.shape[1] * page, cut.share))
    num_results = num_parts * B * T * H
    part_acc, part_sums = (q.new_empty(num_results, size, dtype=torch.float32) for size in (D, 2))
    out, lse = results_like(q)
    width = padded(D)
    long = (cut.share * cut.most_parts // 2).bit_length() - 1
    shape = {"D": D, "BLOCK_D": width, "PAGE": page, "PRECISION": precision(q.dtype)}
    shape |= {"LEAST": cut.share, "LONG": long}
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
        BLOCK_G=triton.next_power_of_2(H // K), PARTS=cut.at_once, LEVELS=cut.at_once.bit_length() - 1,
        num_warps=cut.num_warps, num_stages=1, **overlap(q.device),
    )  # fmt: skip
    return out, lse
