"""Matrix products of a few rows, and the small work around them.

Of few rows a product takes as long as its weights take to come from memory, and in a small model less than
the launches around it. So the first weights are asked for before it is the kernel's turn; the gate of a
feed-forward is part of the product that makes it, and so is the residual that a product is added to. In a
small model the RMSNorm is no launch either: a single row's product does it all by itself; of more rows, the
product before leaves the stream times the norm's weight and the sums of squares (`Ahead`), and the root mean
square, being one factor for all columns, waits for the end.

To scale the rows and to sum their squares where they are read would cost more: each tile of columns does that
again for all rows, and on Hopper, where tensor cores read x straight from shared memory, it has to pass
through registers first: the loop over the depth becomes four times as long.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, fetch, launched, overlap
from longspec.kernels.norm import MOST_ROWS, Ahead, Norm, Stream, norm_stream
from longspec.kernels.tiling import gpu_size, precision

# A single row of a small matrix is one tile.
_SMALL, _LONGEST = 1 << 22, 4096
_LINE, _LINES = 128, 8  # bytes that come from memory together, and how many such are asked for early


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
def _row_kernel(
    x, delta, norm, weight, bias, residual, out, total, num_in, num_out, eps,
    COLS: tl.constexpr, DEPTH: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, LATE: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
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


@launched
@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _rows_kernel(
    x, squares, weight, bias, residual, next_factor, next_scaled, next_squares, out,
    num_rows, num_parts, num_in, num_out, eps,
    ROWS: tl.constexpr, MOST: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """With NORM x is `Ahead.scaled`, and num_parts of squares come with it; with AHEAD the next are made."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    dtype = x.dtype.element_ty
    # What is outside reads the last one again: nobody keeps it.
    rows_at = x + tl.minimum(row, num_rows - 1)[:, None] * num_in
    columns_at = weight + tl.minimum(col, num_out - 1).to(tl.int64) * num_in
    second_at = num_out.to(tl.int64) * num_in
    place = row[:, None] * num_out + col[None, :]
    mask = (row < num_rows)[:, None] & (col < num_out)[None, :]
    lines = columns_at[:, None] + tl.minimum(tl.arange(0, LINES) * LINE, num_in - 1)[None, :]
    fetch(lines, OVERLAP)
    if GATED:
        fetch(lines + second_at, OVERLAP)
    if AHEAD:
        factor = tl.load(next_factor + col, mask=col < num_out, other=0.0).to(tl.float32)
    await_turn(OVERLAP)
    # Asked for together with the first of x, so that they are there when the product is.
    if RESIDUAL:
        stream = tl.load(residual + place, mask=mask, other=0.0)
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
        i = first + tl.arange(0, DEPTH)
        value = tl.load(rows_at + i[None, :], mask=(i < num_in)[None, :], other=0.0)
        weights_at = columns_at[None, :] + i[:, None]
        weights = tl.load(weights_at, mask=(i < num_in)[:, None], other=0.0)
        result = tl.dot(value, weights, result, input_precision=PRECISION)
        if GATED:
            second = tl.load(weights_at + second_at, mask=(i < num_in)[:, None], other=0.0)
            up = tl.dot(value, second, up, input_precision=PRECISION)
    if NORM:
        scale = tl.rsqrt(tl.sum(sums, 0) / num_in + eps)[:, None]
        result *= scale
        up *= scale
    if BIAS:
        result += tl.load(bias + col, mask=col < num_out, other=0.0).to(tl.float32)[None, :]
    if GATED:
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


def few_rows(
    x: Stream,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Stream, Stream]:
    """x @ weight.T + bias; and x [..., in] itself, with nothing lacking.

    With `norm` the product is that of the normed x, which alone may lack something. With `gated` the product
    is gate and up side by side, and silu(gate) * up is returned instead. With `residual` [..., out] what is
    returned has that added to it; with `factor`, the weight of a norm to come, it has `ahead` (see `folds`).
    """
    assert x.delta is None or norm is not None, "what x lacks is added by the norm that follows it"
    num_out, num_in = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    value = x.x.contiguous()
    num_rows = value.numel() // num_in
    out = torch.empty(*value.shape[:-1], num_out, dtype=value.dtype, device=value.device)
    added = value if residual is None else residual.contiguous()
    options = {"GATED": gated, "BIAS": bias is not None, "RESIDUAL": residual is not None}
    options |= overlap(value.device)
    if num_rows == 1 and _is_small(weight) and num_in <= _LONGEST:
        total = value if x.delta is None else torch.empty_like(value)
        depth = triton.next_power_of_2(num_in)
        cols = max(1, min(8, (8192 if gated else 16384) // depth))
        _row_kernel[(triton.cdiv(num_out, cols),)](
            value, value if x.delta is None else x.delta.contiguous(), value if norm is None else norm[0],
            weight, value if bias is None else bias, added, out, total, num_in, num_out,
            0.0 if norm is None else norm[1], COLS=cols, DEPTH=depth, ADD=x.delta is not None,
            NORM=norm is not None, LATE=_folds(value.dtype), num_warps=4, **options,
        )  # fmt: skip
        return Stream(out), Stream(total)
    squares = None
    if norm is not None and x.ahead is not None:
        assert x.ahead.factor is norm[0], "what was made ahead was made for another norm"
        value, squares = x.ahead.scaled, x.ahead.squares
    elif norm is not None:
        value, x = norm_stream(x, norm)
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    cols, depth, stages, warps = _tile(rows, weight, gated)
    grid = (triton.cdiv(num_out, cols), triton.cdiv(num_rows, rows))
    ahead = None if factor is None else Ahead.empty(factor, out, grid[0])
    num_parts = 1 if squares is None else len(squares)
    _rows_kernel[grid](
        value, value if squares is None else squares, weight, value if bias is None else bias, added,
        *(ahead or (out, out, out)), out, num_rows, num_parts, num_in, num_out,
        0.0 if norm is None else norm[1], ROWS=rows, MOST=MOST_ROWS, COLS=cols, DEPTH=depth,
        PARTS=triton.next_power_of_2(triton.cdiv(num_parts, triton.cdiv(num_in, depth))),
        LINE=_LINE // value.itemsize, LINES=_LINES, NORM=squares is not None, AHEAD=ahead is not None,
        PRECISION=precision(value.dtype), num_warps=warps, num_stages=stages, **options,
    )  # fmt: skip
    return Stream(out, ahead=ahead), x


def _tile(rows: int, weight: Tensor, gated: bool) -> tuple[int, int, int, int]:
    """Columns and depth of a program's tile, how many are under way, and the program's warps: what was
    fastest on an H200, cut down to what the GPU holds."""
    sms, shared = gpu_size(weight.device)
    # Where tiles of 32 columns are few enough for all to run at once, each needs more under way.
    few = weight.shape[0] <= 32 * sms
    warps = 4
    if weight.dtype == torch.float32:
        cols, depth, stages = 16, 32, 4
    elif _is_small(weight):
        cols, depth, stages, warps = (16, 256, 3, 2) if rows == 16 else (16, 128, 4, 4)
    elif rows == 16:
        cols, depth, stages = 32, 256, 6 if few else 4
    else:
        cols, depth, stages = (32, 128, 6) if few else (64, 128, 4)
    stage = (rows + cols * (2 if gated else 1)) * depth * weight.itemsize
    return cols, depth, max(1, min(stages, shared // stage)), warps


def _is_small(weight: Tensor) -> bool:
    """Whether its product takes less time than the launches around it."""
    return weight.numel() <= _SMALL


def covers(x: Tensor, weight: Tensor) -> bool:
    """Whether `few_rows` is for this product."""
    num_rows = x.numel() // x.shape[-1]
    if _is_small(weight):
        return num_rows <= MOST_ROWS
    # A library does better by a large matrix where tensor cores do nothing: a single row, and fp32.
    return 1 < num_rows <= MOST_ROWS and x.dtype != torch.float32


def folds(num_rows: int, weight: Tensor) -> bool:
    """Whether `few_rows` of a normed stream wants it with what the norm needs made ahead."""
    # One row's norm is its product's own work; beside a large product, a launch does not matter.
    return 1 < num_rows <= MOST_ROWS and _is_small(weight) and _folds(weight.dtype)


def _folds(dtype: torch.dtype) -> bool:
    """Whether rows are scaled to a mean square of 1 behind their product: before that, fp16 may overflow."""
    return dtype != torch.float16
