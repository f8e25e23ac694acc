"""Attention of a few queries per row over a long KV cache: at most two launches, whatever the lengths are.

The cache consists of pages that all rows share (`longspec.kernels.pages`). The first launch cuts each row's
prefix into parts and attends to each part. The query heads that share a KV head are rows of one tile, so a
key is read once for all of them. The second launch attends to the new nodes, which follow the prefix, and
merges the result with the parts by their lse. Only the kernels read the length of the prefix: the grid
depends on shapes, and a program without work ends at once.

Keys and values may be fp8. A tile is converted to the queries' dtype, which holds the same numbers, right
after it is loaded.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longspec.kernels.launch import await_previous, await_turn, fetch, launched, overlap, start_next
from longspec.kernels.pages import check_tables, place_of
from longspec.kernels.tiling import (
    Tiling,
    choose_slice,
    choose_splits,
    choose_tiling,
    copies_tiles,
    gpu_size,
    precision,
)

# Rows of a merging program: the smallest number that `tl.dot` accepts.
MERGE_ROWS = 16
# If all heads together have at least this many numbers, the output product counts as large (see LATE).
_LATE_WIDTH = 4096
_UNBOUNDED = 2**31 - 1


@triton.jit
def weigh(q, k, visible, high, scale, PRECISION: tl.constexpr, MASKED: tl.constexpr) -> tl.tuple:
    """The weights of one tile of keys (online softmax in base 2): the largest score with this tile, times
    `scale`, the weights relative to it, and the factor for what was summed relative to `high`."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    higher = tl.maximum(high, tl.max(scores, 1) * scale)
    # For a row that has seen nothing yet, -inf - -inf would be nan.
    base = tl.where(higher == -float("inf"), 0.0, higher) if MASKED else higher
    return higher, tl.exp2(scores * scale - base[:, None]), tl.exp2(high - base)


@triton.jit
def absorb(
    q, k, v, visible, high, total, acc, scale, PRECISION: tl.constexpr, MASKED: tl.constexpr
) -> tl.tuple:  # fmt: skip
    """Add one tile of keys: `high` is the largest score so far, times `scale`."""
    high, weights, fade = weigh(q, k, visible, high, scale, PRECISION, MASKED)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision=PRECISION)
    return high, total, acc


@triton.jit
def _parts(length, window, num_splits, UNIT: tl.constexpr, OWN: tl.constexpr):
    """Where the last `window` entries of the prefix begin, where the tile with that entry begins, where they
    end, and how many entries one part has, counted from the start of that tile.

    With OWN there is one query, and its own entry is the last one.
    """
    begin = tl.maximum(length - window, 0)
    aligned = begin // UNIT * UNIT
    end = length + 1 if OWN else length
    share = tl.cdiv(tl.cdiv(end - aligned, num_splits), UNIT) * UNIT
    return begin, aligned, end, tl.maximum(share, UNIT)


@triton.jit
def query_offsets(row, head, stride_t, stride_h, group) -> tl.tensor:
    """The offsets of a KV head's folded rows: row r is query r // group of the group's head r % group."""
    return (row // group) * stride_t + (head * group + row % group) * stride_h


@triton.jit
def tile_at(
    box, at, stride, layer, head, place, valid,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BOXES: tl.constexpr, EDGE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The tile of keys or values at `place`, loaded with its descriptor or from the head's pointer. With EDGE
    only the valid entries are correct; the others are arbitrary."""
    if BOXES:
        return box.load([layer, head, place, 0]).reshape([BLOCK_S, BLOCK_D])
    else:
        entry, d = place + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
        mask = (d < D)[None, :]
        if EDGE:
            mask = mask & valid[:, None]
        return tl.load(at + (entry.to(tl.int64) * stride)[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _absorb_edge(
    query, k, v, keys, values, k_s, v_s, layer, head, number, first, low, end, high, total, acc, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PAGE: tl.constexpr, BOXES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add entries `low` to `end` (exclusive) of the tile that begins at entry `first` in page `number`."""
    entry = first + tl.arange(0, BLOCK_S)
    valid = (entry >= low) & (entry < end)
    place = number * PAGE + first % PAGE
    key = tile_at(k, keys, k_s, layer, head, place, valid, D, BLOCK_D, BLOCK_S, BOXES, True)
    value = tile_at(v, values, v_s, layer, head, place, valid, D, BLOCK_D, BLOCK_S, BOXES, True)
    # The other values may be nan, and 0 * nan is nan.
    value = tl.where(valid[:, None], value.to(query.dtype), 0.0)
    return absorb(query, key, value, valid[None, :], high, total, acc, scale, PRECISION, True)


@launched
@triton.jit(
    do_not_specialize=[
        "num_rows", "num_splits", "sinks", "window", "heads", "layer_heads", "group", "tables_b"
    ]
)  # fmt: skip
def _prefix_kernel(
    q, k, v, keys, values, lengths, tables, part_out, part_lse, out, lse, q_b, q_t, q_h,
    k_l, k_h, k_s, v_l, v_h, v_s, tables_b,
    num_rows, num_splits, sinks, window, heads, layer_heads, group, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, LINE: tl.constexpr, BOXES: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
    OWN: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """With BOXES, k and v are descriptors of keys and values: the hardware copies whole tiles, and reads 0
    outside. With WHOLE there is only one part, and its result is the final one.

    A tile begins at a multiple of BLOCK_S, which divides PAGE, so a tile is always within one page.
    """
    # Programs that read the same keys are neighbours, so that the keys are in the L2 cache.
    tile, split, problem = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = problem // heads, problem % heads
    layer, theirs = head // layer_heads, head % layer_heads
    length = tl.load(lengths + b).to(tl.int32)
    begin, aligned, behind, share = _parts(length, window, num_splits, BLOCK_S, OWN)
    start = aligned + split * share
    tables += b.to(tl.int64) * tables_b
    # Clamped, because a part without work would read past the table.
    number = tl.load(tables + tl.minimum(start, tl.maximum(behind - 1, 0)) // PAGE)
    keys += layer.to(tl.int64) * k_l + theirs.to(tl.int64) * k_h
    values += layer.to(tl.int64) * v_l + theirs.to(tl.int64) * v_h
    if OVERLAP:
        # Earlier kernels wrote the prefix, so its first tile can be fetched while the queries are computed.
        entry = number.to(tl.int64) * PAGE + start % PAGE + tl.arange(0, BLOCK_S)
        line = tl.arange(0, BLOCK_D // LINE) * LINE
        fetch(keys + (entry * k_s)[:, None] + line[None, :], OVERLAP)
        fetch(values + (entry * v_s)[:, None] + line[None, :], OVERLAP)
    await_turn(OVERLAP)
    row, d = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    inside = (row < num_rows)[:, None] & (d < D)[None, :]
    rows_at = q + b.to(tl.int64) * q_b + query_offsets(row, head, q_t, q_h, group)
    query = tl.load(rows_at[:, None] + d[None, :], mask=inside, other=0.0)
    if (start >= behind) and not WHOLE:
        return
    end = tl.minimum(start + share, behind)

    high = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)

    if SINKS:
        last = tl.where(split == 0, tl.minimum(sinks, begin), 0)
        for first in tl.range(0, last, BLOCK_S):
            high, total, acc = _absorb_edge(
                query, k, v, keys, values, k_s, v_s, layer, theirs, tl.load(tables + first // PAGE),
                first, 0, last, high, total, acc, scale, D, BLOCK_D, BLOCK_S, PAGE, BOXES, PRECISION,
            )  # fmt: skip
    # The window may begin in the middle of its first tile.
    if WINDOW and start < begin:
        high, total, acc = _absorb_edge(
            query, k, v, keys, values, k_s, v_s, layer, theirs, number, start, begin, end,
            high, total, acc, scale, D, BLOCK_D, BLOCK_S, PAGE, BOXES, PRECISION,
        )  # fmt: skip
        start = tl.minimum(start + BLOCK_S, end)
        number = tl.load(tables + tl.minimum(start, end - 1) // PAGE)
    edge = start + (end - start) // BLOCK_S * BLOCK_S
    for first in tl.range(start, edge, BLOCK_S):
        place = number * PAGE + first % PAGE
        # Load the page number of the next tile now, so that the next iteration does not wait for it.
        number = tl.load(tables + tl.minimum(first + BLOCK_S, end - 1) // PAGE)
        key = tile_at(k, keys, k_s, layer, theirs, place, row, D, BLOCK_D, BLOCK_S, BOXES, False)
        value = tile_at(v, values, v_s, layer, theirs, place, row, D, BLOCK_D, BLOCK_S, BOXES, False)
        high, total, acc = absorb(query, key, value, row, high, total, acc, scale, PRECISION, False)
    if edge < end:
        high, total, acc = _absorb_edge(
            query, k, v, keys, values, k_s, v_s, layer, theirs, number, edge, edge, end,
            high, total, acc, scale, D, BLOCK_D, BLOCK_S, PAGE, BOXES, PRECISION,
        )  # fmt: skip

    if WHOLE:
        write_rows(out, lse, b.to(tl.int64), head, row, d, high, total, acc, num_rows, heads, group, D)
    else:
        place = (problem.to(tl.int64) * num_splits + split) * num_rows + row
        tl.store(part_out + place[:, None] * D + d[None, :], acc / total[:, None], mask=inside)
        tl.store(part_lse + place, high + tl.log2(total), mask=row < num_rows)


@triton.jit
def load_parts(
    part_out, part_lse, first, num_parts, at, row, num_rows, d, D: tl.constexpr, PARTS: tl.constexpr
) -> tl.tuple:  # fmt: skip
    """The results of PARTS parts from `first` on; parts past the last one get weight 0."""
    part = first + tl.arange(0, PARTS)
    place = (at + part)[:, None] * num_rows + row[None, :]
    mask = (part < num_parts)[:, None] & (row < num_rows)[None, :]
    lses = tl.load(part_lse + place, mask=mask, other=-float("inf"))
    mask = mask[:, :, None] & (d < D)[None, None, :]
    return lses, tl.load(part_out + place[:, :, None] * D + d[None, None, :], mask=mask, other=0.0)


@triton.jit
def absorb_parts(lses, outs, high, total, acc) -> tl.tuple:
    """Add the results of more parts, weighted by their lses."""
    higher = tl.maximum(high, tl.max(lses, 0))
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp2(lses - base[None, :])
    fade = tl.exp2(high - base)
    total = total * fade + tl.sum(weights, 0)
    return higher, total, acc * fade[:, None] + tl.sum(outs * weights[:, :, None], 0)


@launched
@triton.jit(do_not_specialize=["num_rows", "num_nodes", "num_splits", "window", "heads", "group", "tables_b"])
def _merge_kernel(
    q, k, v, tree, lengths, tables, part_out, part_lse, out, lse,
    q_b, q_t, q_h, k_h, k_s, v_h, v_s, tables_b, tree_b, tree_t,
    num_rows, num_nodes, num_splits, window, heads, group, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    SLICE: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr, NODES: tl.constexpr,
    TREE: tl.constexpr, OWN: tl.constexpr, LATE: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute SLICE numbers of each head's result. Each slice computes the few scores again.

    Queries and nodes were written before the first launch, so this kernel attends to them while that runs.

    With LATE the next kernel starts at the end: a large product of one row loads megabytes of weights as soon
    as it starts, and the few parts that are merged here would wait behind them.
    """
    tile, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, head = problem // heads, problem % heads
    row, d = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    ours = tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    rows_at = q + b * q_b + query_offsets(row, head, q_t, q_h, group)
    query = tl.load(
        rows_at[:, None] + d[None, :], mask=(row < num_rows)[:, None] & (d < D)[None, :], other=0.0
    )
    length = tl.load(lengths + b).to(tl.int32)
    _, aligned, behind, share = _parts(length, window, num_splits, UNIT, OWN)
    num_parts, at = tl.cdiv(behind - aligned, share), problem * num_splits
    high = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, SLICE], tl.float32)
    if NODES:
        k += head * k_h
        v += head * v_h
        tables += b * tables_b
        # In a chain, no query of a tile sees nodes after the tile's last query.
        num_seen = num_nodes if TREE else tl.minimum(num_nodes, (tile * BLOCK_R + BLOCK_R - 1) // group + 1)
        for first in tl.range(0, num_seen, BLOCK_N):
            node = first + tl.arange(0, BLOCK_N)
            place = place_of(tables, length + node, node < num_nodes, PAGE)
            real = (node < num_nodes)[:, None]
            key = tl.load(k + (place * k_s)[:, None] + d[None, :], mask=real & (d < D)[None, :], other=0.0)
            value_at = v + (place * v_s)[:, None] + ours[None, :]
            value = tl.load(value_at, mask=real & (ours < D)[None, :], other=0.0)
            pairs = (row < num_rows)[:, None] & (node < num_nodes)[None, :]
            if TREE:
                sees_at = tree + b * tree_b + (row // group * tree_t)[:, None] + node[None, :]
                visible = tl.load(sees_at, mask=pairs, other=0) != 0
            else:
                visible = pairs & (node[None, :] <= (row // group)[:, None])
            high, total, acc = absorb(query, key, value, visible, high, total, acc, scale, PRECISION, True)
    await_previous(OVERLAP)
    if not LATE:
        start_next(OVERLAP)
    lses, outs = load_parts(part_out, part_lse, 0, num_parts, at, row, num_rows, ours, D, PARTS)
    high, total, acc = absorb_parts(lses, outs, high, total, acc)
    for first in tl.range(PARTS, num_parts, PARTS):
        lses, outs = load_parts(part_out, part_lse, first, num_parts, at, row, num_rows, ours, D, PARTS)
        high, total, acc = absorb_parts(lses, outs, high, total, acc)
    write_rows(out, lse, b, head, row, ours, high, total, acc, num_rows, heads, group, D)
    if LATE:
        start_next(OVERLAP)


@triton.jit
def write_rows(
    out, lse, b, head, row, d, high, total, acc, num_rows, heads, group, D: tl.constexpr
) -> None:  # fmt: skip
    """Write a tile of results, [B, T, H, D] and [B, T, H]; a row that saw nothing gets 0 and -inf."""
    # Folded rows are T queries times the `group` heads of one KV head, so T is num_rows / group.
    first = b * (num_rows // group) * heads * group
    place = first + query_offsets(row, head, heads * group, 1, group)
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    inside = (row < num_rows)[:, None] & (d < D)[None, :]
    tl.store(out + place[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=inside)
    ln_two = 0.6931471805599453
    tl.store(lse + place, (high + tl.log2(total)) * ln_two, mask=row < num_rows)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    tables: Tensor,
    page: int,
    tree: Tensor | None = None,
    nodes: bool = True,
    sinks: int = 0,
    window: int | None = None,
    tiling: Tiling | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries q [B, T, H, D] over pages of KV k, v [K, S, D]: `out` like q, and `lse` fp32 [B, T, H].

    `tables`, int32 [B, M], give the pages of each row (`longspec.kernels.pages`). Each query sees the row's
    first `lengths` [B] entries; with a `window`, only the first `sinks` and the last `window` of them. With
    `nodes` it also sees those of the next T entries that `tree`, bool [T, T] or [B, T, T], allows, or without
    a tree those up to its own. `tiling` and `num_splits` are for tuning.

    Without nodes, k and v may hold several layers, [C, K, S, D]. Then the first H / C of the H heads attend
    to the first layer, the next H / C to the second, and so on.
    """
    B, T, H, D = q.shape
    assert k.ndim == 3 or not nodes, "with nodes, k and v are those of one layer"
    check_tables(tables, page)
    k, v = (part if part.ndim == 4 else part[None] for part in (k, v))
    K, capacity = k.shape[0] * k.shape[1], tables.shape[1] * page
    num_rows = T * H // K
    tiling = tiling or choose_tiling(num_rows, D, q.dtype, q.device)
    num_tiles = triton.cdiv(num_rows, tiling.num_rows)
    last = _UNBOUNDED if window is None else window
    assert last > 0, "a window has at least one entry"
    if num_splits is None:
        num_programs, longest = num_tiles * B * K, min(capacity, last)
        num_splits, tiling = _choose_parts(num_programs, longest, tiling, D, q.dtype, q.device)
    assert page % tiling.num_keys == 0, f"a page of {page} entries is not a multiple of the tile of {tiling}"
    # A single query sees everything up to its own entry, so that entry counts as prefix.
    own = nodes and T == 1
    whole = num_splits == 1 and (own or not nodes)
    part_out, part_lse = parts_like(q, 0 if whole else num_splits)
    out, lse = results_like(q)
    shape = {"D": D, "BLOCK_D": padded(D), "PAGE": page, "PRECISION": precision(q.dtype)}
    boxes, box = copies_tiles(q.device), [1, 1, tiling.num_keys, shape["BLOCK_D"]]
    whole_tiles = (TensorDescriptor.from_tensor(part, box) if boxes else part for part in (k, v))
    mask, mask_strides = q, (0, 0)
    if tree is not None:
        # Before the first launch, because the second kernel reads it before it waits for the first.
        mask = tree.contiguous().view(torch.uint8)
        mask_strides = (T * T if tree.ndim == 3 else 0, T)
    _prefix_kernel[(num_tiles, num_splits, B * K)](
        q, *whole_tiles, k, v, lengths, tables, part_out, part_lse, out, lse,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], tables.stride(0),
        num_rows, num_splits, sinks, last, K, k.shape[1], H // K, score_scale(D), **shape,
        BLOCK_R=tiling.num_rows, BLOCK_S=tiling.num_keys, LINE=min(padded(D), 128 // k.itemsize),
        BOXES=boxes, SINKS=sinks > 0 and window is not None, WINDOW=window is not None, OWN=own, WHOLE=whole,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **overlap(q.device),
    )  # fmt: skip
    if whole:
        return out, lse
    num_tiles = triton.cdiv(num_rows, MERGE_ROWS)
    piece, parts = choose_slice(num_rows, num_tiles * B * K, q.device)
    grid = (num_tiles, B * K, triton.cdiv(D, piece))
    _merge_kernel[grid](
        q, k, v, mask, lengths, tables, part_out, part_lse, out, lse,
        *q.stride()[:3], *k.stride()[1:3], *v.stride()[1:3], tables.stride(0), *mask_strides,
        num_rows, T, num_splits, last, K, H // K, score_scale(D), **shape,
        BLOCK_R=MERGE_ROWS, BLOCK_N=_node_block(T, D, q.dtype), SLICE=piece, PARTS=parts,
        UNIT=tiling.num_keys, NODES=nodes and not own, TREE=tree is not None, OWN=own,
        LATE=own and H * D >= _LATE_WIDTH, num_warps=4, num_stages=1, **overlap(q.device),
    )  # fmt: skip
    return out, lse


def _choose_parts(
    num_programs: int, capacity: int, tiling: Tiling, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, Tiling]:
    """The number of parts and the tiling for it: at least as many parts as `choose_splits` gives, and enough
    that several programs share a single long row."""
    least = min(8, triton.cdiv(capacity, 8192))
    num_splits = max(least, choose_splits(num_programs, capacity, tiling, device))
    sms, shared = gpu_size(device)
    if least > 1 and tiling.num_rows == 16 and num_programs * num_splits >= 2 * sms:
        # Short parts start and end often. Two programs on one multiprocessor hide each other's latency.
        while 2 * tiling.num_bytes(head_dim, dtype) > shared and tiling.num_keys > 16:
            tiling = replace(tiling, num_keys=tiling.num_keys // 2)
    return num_splits, tiling


def results_like(q: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised `out` and `lse` for these queries."""
    assert q.stride(3) == 1, "the numbers of a head must be contiguous"
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(q.shape[:3], dtype=torch.float32)


def parts_like(q: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """Uninitialised results of `num_parts` parts for these queries, and their lse in base 2."""
    num_rows = num_parts * q.shape[0] * q.shape[1] * q.shape[2]
    return q.new_empty(num_rows, q.shape[3], dtype=torch.float32), q.new_empty(num_rows, dtype=torch.float32)


def padded(head_dim: int) -> int:
    """The width of tiles: a power of two and at least 16, as `tl.dot` requires."""
    return max(16, triton.next_power_of_2(head_dim))


def score_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim), times log2(e) because the kernels use powers of two."""
    return 1.4426950408889634 / head_dim**0.5


def _node_block(num_nodes: int, head_dim: int, dtype: torch.dtype) -> int:
    """How many nodes are attended to at a time; `tl.dot` needs at least 16."""
    most = 16 if dtype == torch.float32 else 32 if head_dim > 128 else 64
    return max(16, min(most, triton.next_power_of_2(num_nodes)))
