"""The kernels of `longspec.kernels.linear`, a tile of a product with norm, gate and residual; and what all
products of several rows share.

The product of a single row computes its RMSNorm itself. For more rows, the previous product writes the stream
times the norm's weight and the sums of squares (`Ahead`). The root mean square is one factor for all columns,
so it is applied at the end. To scale the rows and sum their squares where they are read would cost more: each
tile of columns would do it again for all rows. On Hopper, tensor cores read x directly from shared memory; x
would have to pass through registers first, and the loop over the depth would take four times as long.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, fetch, launched
from longspec.kernels.widen import widen

GROUP = tl.constexpr(16)
"""Columns whose squares are summed to one part, where the order of sums matters."""
LINE = 128
"""Bytes of a cache line."""
# The most weights of a small matrix.
_SMALL = 1 << 23


def is_small(weight: Tensor, num_rows: int = 2) -> bool:
    """Whether the product of one row, or of several, takes little more time than the launches around it."""
    if num_rows == 1:
        return 2 * weight.numel() <= 3 * _SMALL
    if weight.itemsize == 1:
        return 2 * weight.numel() <= _SMALL  # larger ones of 8 bits were not timed with small tiles
    return weight.numel() <= _SMALL


def few_tile_rows(num_rows: int) -> int:
    """The rows of a tile for at most 64 rows."""
    return 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64


def count_lines(weight: Tensor) -> int:
    """How many cache lines of each column are fetched early: all of a small matrix, 8 of a large one."""
    every = triton.next_power_of_2(triton.cdiv(weight.shape[1] * weight.itemsize, LINE))
    return every if is_small(weight) else 8


@triton.jit
def silu_gate(gate, up, dtype: tl.constexpr) -> tl.tensor:
    """silu(gate) * up, rounded where separate operations round."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def add_rounded(stream, result) -> tl.tensor:
    """stream + result, rounded where separate operations round."""
    return stream.to(tl.float32) + result.to(stream.dtype).to(tl.float32)


@launched
@triton.jit
def row_kernel(
    x, delta, norm, weight, bias, residual, out, total, num_in, num_out, eps,
    COLS: tl.constexpr, DEPTH: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, LATE: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Some columns of one row's product, without tensor cores, because memory is the limit.

    With LATE the norm is rounded as for more rows, so that a row alone gives the same result as among others.
    """
    col, i = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, DEPTH)
    inside, wanted = i < num_in, col < num_out
    dtype = x.dtype.element_ty
    weights_at = weight + col[:, None] * num_in + i[None, :]
    mask = wanted[:, None] & inside[None, :]
    weights = tl.load(weights_at, mask=mask, other=0.0)
    if GATED:
        second = tl.load(weights_at + num_out * num_in, mask=mask, other=0.0)
    if NORM:
        factor = tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)
    await_turn(OVERLAP)
    value = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        stream = tl.load(residual + col, mask=wanted, other=0.0)
    if ADD:
        # Round as the stored stream is rounded, so that the norm sees the same numbers as the next layer.
        value = (value + tl.load(delta + i, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        if tl.program_id(0) == 0:
            tl.store(total + i, value.to(dtype), mask=inside)
    late = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 0) / num_in + eps)
        if LATE:
            late = scale
        else:
            value = value * scale
        value = (value * factor).to(dtype).to(tl.float32)
    result = tl.sum(weights.to(tl.float32) * value[None, :], 1) * late
    if BIAS:
        result += tl.load(bias + col, mask=wanted, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(second.to(tl.float32) * value[None, :], 1) * late
        if BIAS:
            up += tl.load(bias + num_out + col, mask=wanted, other=0.0).to(tl.float32)
        result = silu_gate(result, up, dtype)
    if RESIDUAL:
        result = add_rounded(stream, result)
    tl.store(out + col, result.to(dtype), mask=wanted)


@triton.jit
def begin(
    x, weight, next_factor, start, num_rows, num_in, num_out,
    ROWS: tl.constexpr, COLS: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr, GATED: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Prepare, then wait for the turn. Weights are fetched from the depth `start` on. Returns a tile's rows
    and columns, their pointers in x and in the weights, the offset of the second weights (GATED), and the
    next norm's weight (AHEAD)."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    # Rows and columns outside read the last one again; their results are not stored.
    rows_at = x + tl.minimum(row, num_rows - 1) * num_in
    columns_at = weight + tl.minimum(col, num_out - 1).to(tl.int64) * num_in
    second_at = num_out.to(tl.int64) * num_in
    lines = columns_at[:, None] + tl.minimum(start + tl.arange(0, LINES) * LINE, num_in - 1)[None, :]
    fetch(lines, OVERLAP)
    if GATED:
        fetch(lines + second_at, OVERLAP)
    factor = 0.0
    if AHEAD:
        factor = tl.load(next_factor + col, mask=col < num_out, other=0.0).to(tl.float32)
    await_turn(OVERLAP)
    return row, col, rows_at, columns_at, second_at, factor


@triton.jit
def load_tile(x, row, col, num_rows, num_cols) -> tl.tensor:
    inside = (row < num_rows)[:, None] & (col < num_cols)[None, :]
    return tl.load(x + row[:, None] * num_cols + col[None, :], mask=inside, other=0.0)


@triton.jit
def _pair_sums(x, LEVELS: tl.constexpr):
    """Sums of every 2 ** LEVELS neighbours of x [R, C]. Pair by pair, because the order of `tl.sum` follows
    the layout of the tile."""
    for _ in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        x = left + right
    return x


@triton.jit
def _square_sums(x):
    """Sums of the squares of every GROUP neighbours of x [R, C], in a fixed order."""
    left, right = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    # Said explicitly: left to itself, the compiler fuses one product or the other into the sum.
    return _pair_sums(tl.fma(left, left, right * right), 3)


@triton.jit
def finish(
    result, up, scale, bias, stream, factor, next_scaled, next_squares, out, row, col, num_rows, num_out,
    MOST: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    AHEAD: tl.constexpr, EXACT: tl.constexpr,
) -> None:  # fmt: skip
    """Finish a tile after its product: the norm's `scale`, bias, gate, residual, and what the next norm needs
    (AHEAD)."""
    dtype = out.dtype.element_ty
    place = row[:, None] * num_out + col[None, :]
    mask = (row < num_rows)[:, None] & (col < num_out)[None, :]
    if NORM:
        result *= scale[:, None]
    if BIAS:
        result += tl.load(bias + col, mask=col < num_out, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if NORM:
            up *= scale[:, None]
        if BIAS:
            up += tl.load(bias + num_out + col, mask=col < num_out, other=0.0).to(tl.float32)[None, :]
        result = silu_gate(result, up, dtype)
    if RESIDUAL:
        result = add_rounded(stream, result)
    result = result.to(dtype)
    tl.store(out + place, result, mask=mask)
    if AHEAD:
        wide = result.to(tl.float32)
        tl.store(next_scaled + place, (wide * factor[None, :]).to(dtype), mask=mask)
        if EXACT:
            sums = _square_sums(tl.where(mask, wide, 0.0))
            part = tl.program_id(0) * sums.shape[1] + tl.arange(0, sums.shape[1])
            wanted = (row < num_rows)[:, None] & (part * GROUP < num_out)[None, :]
            tl.store(next_squares + part[None, :] * MOST + row[:, None], sums, mask=wanted)
        else:
            sums = tl.sum(tl.where(mask, wide * wide, 0.0), 1)
            tl.store(next_squares + tl.program_id(0) * MOST + row, sums, mask=row < num_rows)


@launched
@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def split_kernel(
    x, squares, weight, bias, residual, next_factor, next_scaled, next_squares, out,
    num_rows, num_parts, num_in, num_out, eps,
    ROWS: tl.constexpr, MOST: tl.constexpr, COLS: tl.constexpr, SPLIT: tl.constexpr, DEPTH: tl.constexpr,
    PARTS: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """As `rows_kernel`, but each warp computes 1 / SPLIT of the depth. Between two dependent steps a tensor
    core waits longer than a step takes, and with few rows it has little other work meanwhile."""
    row, col, rows_at, columns_at, second_at, factor = begin(
        x, weight, next_factor, 0, num_rows, num_in, num_out,
        ROWS, COLS, LINE, LINES, GATED, AHEAD, OVERLAP,
    )  # fmt: skip
    stream, scale = 0.0, 0.0
    if RESIDUAL:
        stream = load_tile(residual, row, col, num_rows, num_out)
    if NORM:
        part = tl.arange(0, PARTS)[:, None]
        parts = tl.load(squares + part * MOST + row[None, :], mask=part < num_parts, other=0.0)
    result = tl.zeros([SPLIT, ROWS, COLS], tl.float32)
    up = tl.zeros([SPLIT, ROWS, COLS], tl.float32)
    for first in tl.range(0, num_in, SPLIT * DEPTH):
        i = first + tl.arange(0, SPLIT)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
        value = tl.load(rows_at[None, :, None] + i[:, None, :], mask=(i < num_in)[:, None, :], other=0.0)
        weights_at = columns_at[None, None, :] + i[:, :, None]
        weights = tl.load(weights_at, mask=(i < num_in)[:, :, None], other=0.0)
        result = tl.dot(value, weights, result)
        if GATED:
            second = tl.load(weights_at + second_at, mask=(i < num_in)[:, :, None], other=0.0)
            up = tl.dot(value, second, up)
    if NORM:
        scale = tl.rsqrt(tl.sum(parts, 0) / num_in + eps)
    finish(
        tl.sum(result, 0), tl.sum(up, 0), scale, bias, stream, factor, next_scaled, next_squares, out,
        row, col, num_rows, num_out, MOST, NORM, GATED, BIAS, RESIDUAL, AHEAD, False,
    )  # fmt: skip


@triton.jit
def _add_product(
    value, weights, total, scales, col, first, num_in, num_cols,
    SCALED: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr, CONVERT: tl.constexpr,
):  # fmt: skip
    """total [R, C] + value [R, D] @ weights.T [D, C]. With SCALED the total is transposed. With RUN the
    columns of this depth have scales of their own."""
    if SCALED:
        # Tensor cores read their left operand from registers, so converted weights are not stored again.
        weights = widen(weights, value.dtype, CONVERT)
        if RUN > 0:
            at = scales + tl.minimum(col, num_cols - 1) * (num_in // RUN) + first // RUN
            total += tl.dot(weights, tl.trans(value), input_precision=PRECISION) * tl.load(at)[:, None]
        else:
            total = tl.dot(weights, tl.trans(value), total, input_precision=PRECISION)
    else:
        total = tl.dot(value, tl.trans(weights), total, input_precision=PRECISION)
    return total


@triton.jit
def sum_shares(total, shares, num_done, SHARES: tl.constexpr) -> tl.tuple:
    """Store the sums of this program's share of the depth. The program that is the last to do so for its tile
    gets the total of all shares, added in their order, and True."""
    size: tl.constexpr = total.shape[0] * total.shape[1]
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    place = tl.arange(0, total.shape[0])[:, None] * total.shape[1] + tl.arange(0, total.shape[1])[None, :]
    place += tile * SHARES * size
    tl.store(shares + place + tl.program_id(2) * size, total)
    tl.debug_barrier()  # the atomic operation of one thread publishes the stores of all
    is_last = tl.atomic_add(num_done + tile, 1, sem="acq_rel") == SHARES - 1
    if is_last:
        total = tl.load(shares + place, cache_modifier=".cg")
        for share in range(1, SHARES):
            total += tl.load(shares + place + share * size, cache_modifier=".cg")
        tl.store(num_done + tile, 0)  # for the next launch
    return total, is_last


def count_shares(num_in: int, depth: int, most: int) -> int:
    """How many programs share the depth: `most`, or fewer, so that no program is without a share."""
    return triton.cdiv(num_in, triton.cdiv(num_in, most * depth) * depth)


def room_for_shares(grid: tuple[int, int, int], size: int, out: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """`shares` and `num_done` of `sum_shares`, for programs that store `size` sums each; where nothing is
    shared, `out` stands for them."""
    if grid[2] == 1:
        return [out, out]
    counters = zero_counters(out.device)
    assert grid[0] * grid[1] <= len(counters)
    return [out.new_empty(math.prod(grid) * size, dtype=dtype), counters]


@cache
def zero_counters(device: torch.device) -> Tensor:
    """A counter for each tile: how many of its shares are done. Each kernel sets its counters back to 0."""
    return torch.zeros(1024, dtype=torch.int32, device=device)


@launched
@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def rows_kernel(
    x, x_box, squares, weight, weight_box, scales, bias, residual, next_factor, next_scaled, next_squares,
    out, shares, num_done, num_rows, num_parts, num_in, num_out, eps,
    ROWS: tl.constexpr, MOST: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, SHARES: tl.constexpr,
    SCALED: tl.constexpr, RUN: tl.constexpr, CONVERT: tl.constexpr, PARTS: tl.constexpr,
    LEVELS: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr, BOXES: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, AHEAD: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """With NORM, x is `Ahead.scaled` and `squares` has num_parts parts. With AHEAD the next ones are written.

    With BOXES the hardware copies whole tiles of x and weight with descriptors, and reads 0 outside.

    With SCALED, weights have 8 bits and become the type of x in registers. Each has a scale: one for each
    row of weights or, if RUN is not 0, for every RUN neighbours in it.

    The programs of the third axis share the depth. With one SHARE, a row's product has the same bits in tiles
    of any size: each number is a chain of sums over the depth. With EXACT, so have its squares: those of
    GROUP columns are a part, and PARTS are all of them.
    """
    start, end = 0, num_in
    if SHARES > 1:
        share = tl.cdiv(num_in, SHARES * DEPTH) * DEPTH
        start = tl.program_id(2) * share
        end = tl.minimum(start + share, num_in)
    # Otherwise the compiler lets tensor cores wait for each step: the sums might be set elsewhere.
    tl.assume(start < end)
    row, col, rows_at, columns_at, second_at, factor = begin(
        x, weight, next_factor, start, num_rows, num_in, num_out,
        ROWS, COLS, LINE, LINES, GATED, AHEAD, OVERLAP,
    )  # fmt: skip
    stream, scale = 0.0, 0.0
    # Loaded together with the first tile of x, so that it is there when the product is done.
    if RESIDUAL and SHARES == 1:
        stream = load_tile(residual, row, col, num_rows, num_out)
    result = tl.zeros([COLS, ROWS] if SCALED else [ROWS, COLS], tl.float32)
    up = tl.zeros([COLS, ROWS] if SCALED else [ROWS, COLS], tl.float32)
    sums = tl.zeros([PARTS, ROWS], tl.float32)
    part = tl.arange(0, PARTS)[:, None]
    # Read rows that do not exist, too: without a mask of rows, four numbers are loaded at a time.
    squares_at = squares + part * MOST + row[None, :]
    if NORM and EXACT:
        place = tl.arange(0, PARTS)[None, :]
        parts = tl.load(squares + place * MOST + row[:, None], mask=place < num_parts, other=0.0)
    elif NORM:
        parts = tl.load(squares_at, mask=part < num_parts, other=0.0)
    for first in tl.range(start, end, DEPTH):
        if NORM and not EXACT:
            # A few parts at a time, loaded one iteration ahead: loading all at once would delay x.
            sums += parts
            part += PARTS
            squares_at += PARTS * MOST
            parts = tl.load(squares_at, mask=part < num_parts, other=0.0)
        if BOXES:
            value = x_box.load([tl.program_id(1) * ROWS, first])
            weights = weight_box.load([tl.program_id(0) * COLS, first])
        else:
            i = first + tl.arange(0, DEPTH)
            inside = (i < num_in)[None, :]
            value = tl.load(rows_at[:, None] + i[None, :], mask=inside, other=0.0)
            weights_at = columns_at[:, None] + i[None, :]
            weights = tl.load(weights_at, mask=inside, other=0.0)
        result = _add_product(
            value, weights, result, scales, col, first, num_in, num_out, SCALED, RUN, PRECISION, CONVERT
        )  # fmt: skip
        if GATED:
            if BOXES:
                second = weight_box.load([num_out + tl.program_id(0) * COLS, first])
            else:
                second = tl.load(weights_at + second_at, mask=inside, other=0.0)
            up = _add_product(
                value, second, up, scales, num_out + col, first, num_in, 2 * num_out,
                SCALED, RUN, PRECISION, CONVERT,
            )  # fmt: skip
    if SCALED and RUN == 0:
        result *= tl.load(scales + col, mask=col < num_out, other=0.0)[:, None]
        if GATED:
            up *= tl.load(scales + num_out + col, mask=col < num_out, other=0.0)[:, None]
    if NORM and EXACT:
        total = tl.reshape(_pair_sums(parts, LEVELS), [ROWS])
        scale = tl.rsqrt(total / num_in + eps)
    elif NORM:
        scale = tl.rsqrt(tl.sum(sums, 0) / num_in + eps)
    is_last = True
    if SHARES > 1:
        result, is_last = sum_shares(result, shares, num_done, SHARES)
    if is_last:
        added = stream
        if RESIDUAL and SHARES > 1:
            added = load_tile(residual, row, col, num_rows, num_out)
        product = tl.trans(result) if SCALED else result
        second_product = tl.trans(up) if SCALED else up
        finish(
            product, second_product, scale, bias, added, factor, next_scaled, next_squares, out, row, col,
            num_rows, num_out, MOST, NORM, GATED, BIAS, RESIDUAL, AHEAD, EXACT,
        )  # fmt: skip
