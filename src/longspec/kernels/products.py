"""The kernels of `longspec.kernels.linear`: a tile of a product, and the small work around it.

A single row's product does its RMSNorm all by itself. Of more rows, the product before leaves the stream
times the norm's weight and the sums of squares (`Ahead`), and the root mean square, being one factor for all
columns, waits for the end. To scale the rows and to sum their squares where they are read would cost more:
each tile of columns does that again for all rows, and on Hopper, where tensor cores read x straight from
shared memory, it has to pass through registers first: the loop over the depth becomes four times as long.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspec.kernels.launch import await_turn, fetch, launched


@triton.jit
def _gated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up, rounded where separate operations would round."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def _added(stream, result):
    """stream + result, rounded where separate operations would round."""
    return stream.to(tl.float32) + result.to(stream.dtype).to(tl.float32)


@launched
@triton.jit
def row_kernel(
    x, delta, norm, weight, bias, residual, out, total, num_in, num_out, eps,
    COLS: tl.constexpr, DEPTH: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, LATE: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Some columns of one row's product: no tensor core is faster than the weights come.

    With LATE the norm is rounded as that of more rows is, so that a row gives the same among others as alone.
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
        # Rounded as the residual stream is stored, so that the norm is of what the next layer will see.
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
        result = _gated(result, up, dtype)
    if RESIDUAL:
        result = _added(stream, result)
    tl.store(out + col, result.to(dtype), mask=wanted)


@triton.jit
def _begin(
    x, weight, next_factor, num_rows, num_in, num_out,
    ROWS: tl.constexpr, COLS: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr, GATED: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A tile's rows and columns, where those of x and of the weights begin, how much further the second ones
    do (GATED), and the next norm's weight (AHEAD): what comes before the turn, and the turn."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    # What is outside reads the last one again: nobody keeps it.
    rows_at = x + tl.minimum(row, num_rows - 1) * num_in
    columns_at = weight + tl.minimum(col, num_out - 1).to(tl.int64) * num_in
    second_at = num_out.to(tl.int64) * num_in
    lines = columns_at[:, None] + tl.minimum(tl.arange(0, LINES) * LINE, num_in - 1)[None, :]
    fetch(lines, OVERLAP)
    if GATED:
        fetch(lines + second_at, OVERLAP)
    factor = 0.0
    if AHEAD:
        factor = tl.load(next_factor + col, mask=col < num_out, other=0.0).to(tl.float32)
    await_turn(OVERLAP)
    return row, col, rows_at, columns_at, second_at, factor


@triton.jit
def _load_tile(x, row, col, num_rows, num_cols):
    inside = (row < num_rows)[:, None] & (col < num_cols)[None, :]
    return tl.load(x + row[:, None] * num_cols + col[None, :], mask=inside, other=0.0)


@triton.jit
def _finish(
    result, up, scale, bias, stream, factor, next_scaled, next_squares, out, row, col, num_rows, num_out,
    MOST: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """What comes behind a tile's product: the norm's `scale`, bias, gate and residual, and what the next norm
    needs (AHEAD)."""
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
        result = _gated(result, up, dtype)
    if RESIDUAL:
        result = _added(stream, result)
    result = result.to(dtype)
    tl.store(out + place, result, mask=mask)
    if AHEAD:
        wide = result.to(tl.float32)
        tl.store(next_scaled + place, (wide * factor[None, :]).to(dtype), mask=mask)
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
    """As `rows_kernel`, each warp with a SPLITth of the depth: from one step of it to the next a tensor core
    takes longer than for the step, and of few rows there is little else to do meanwhile."""
    row, col, rows_at, columns_at, second_at, factor = _begin(
        x, weight, next_factor, num_rows, num_in, num_out, ROWS, COLS, LINE, LINES, GATED, AHEAD, OVERLAP
    )
    stream, scale = 0.0, 0.0
    if RESIDUAL:
        stream = _load_tile(residual, row, col, num_rows, num_out)
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
    _finish(
        tl.sum(result, 0), tl.sum(up, 0), scale, bias, stream, factor, next_scaled, next_squares, out,
        row, col, num_rows, num_out, MOST, NORM, GATED, BIAS, RESIDUAL, AHEAD,
    )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def rows_kernel(
    x, x_box, squares, weight, weight_box, bias, residual, next_factor, next_scaled, next_squares, out,
    num_rows, num_parts, num_in, num_out, eps,
    ROWS: tl.constexpr, MOST: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr, BOXES: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """With NORM x is `Ahead.scaled`, and num_parts of squares come with it; with AHEAD the next are made.

    With BOXES there are descriptors of x and weight, by which the hardware copies whole tiles; what is
    outside reads as 0.
    """
    row, col, rows_at, columns_at, second_at, factor = _begin(
        x, weight, next_factor, num_rows, num_in, num_out, ROWS, COLS, LINE, LINES, GATED, AHEAD, OVERLAP
    )
    stream, scale = 0.0, 0.0
    # Asked for together with the first of x, so that they are there when the product is.
    if RESIDUAL:
        stream = _load_tile(residual, row, col, num_rows, num_out)
    result = tl.zeros([ROWS, COLS], tl.float32)
    up = tl.zeros([ROWS, COLS], tl.float32)
    sums = tl.zeros([PARTS, ROWS], tl.float32)
    part = tl.arange(0, PARTS)[:, None]
    # Rows that are none are read as well: without a mask of rows, four numbers come at a time.
    squares_at = squares + part * MOST + row[None, :]
    if NORM:
        parts = tl.load(squares_at, mask=part < num_parts, other=0.0)
    for first in tl.range(0, num_in, DEPTH):
        if NORM:
            # A few parts at a time, asked for one time ahead: all at once would be waited for before x is.
            sums += parts
            part += PARTS
            squares_at += PARTS * MOST
            parts = tl.load(squares_at, mask=part < num_parts, other=0.0)
        if BOXES:
            value = x_box.load([tl.program_id(1) * ROWS, first])
            weights = tl.trans(weight_box.load([tl.program_id(0) * COLS, first]))
        else:
            i = first + tl.arange(0, DEPTH)
            value = tl.load(rows_at[:, None] + i[None, :], mask=(i < num_in)[None, :], other=0.0)
            weights_at = columns_at[None, :] + i[:, None]
            weights = tl.load(weights_at, mask=(i < num_in)[:, None], other=0.0)
        result = tl.dot(value, weights, result, input_precision=PRECISION)
        if GATED:
            if BOXES:
                second = tl.trans(weight_box.load([num_out + tl.program_id(0) * COLS, first]))
            else:
                second = tl.load(weights_at + second_at, mask=(i < num_in)[:, None], other=0.0)
            up = tl.dot(value, second, up, input_precision=PRECISION)
    if NORM:
        scale = tl.rsqrt(tl.sum(sums, 0) / num_in + eps)
    _finish(
        result, up, scale, bias, stream, factor, next_scaled, next_squares, out, row, col, num_rows, num_out,
        MOST, NORM, GATED, BIAS, RESIDUAL, AHEAD,
    )  # fmt: skip
