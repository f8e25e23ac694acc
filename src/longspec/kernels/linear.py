"""Matrix products of a few rows, and the small work around them.

Of few rows a product takes as long as its weights take to come from memory, and in a small model less than
the launches around it. So the first weights are asked for before it is the kernel's turn; the gate of a
feed-forward is part of the product that makes it, and so is the residual that a product is added to; and for
a single row of a small model, the RMSNorm is part of the product that reads it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, fetch, overlap
from longspec.kernels.norm import add_rms_norm, rms_norm
from longspec.kernels.tiling import gpu_size, precision

# Of more rows, a library's products are faster, and the launches do not matter.
MOST_ROWS = 64
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


@triton.jit
def _row_kernel(
    x, delta, norm, weight, bias, residual, out, total, num_in, num_out, eps,
    COLS: tl.constexpr, DEPTH: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some columns of one row's product: no tensor core is faster than the weights come."""
    col, i = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, DEPTH)
    inside, wanted = i < num_in, col < num_out
    dtype = x.dtype.element_ty
    weights_at = weight + col[:, None] * num_in + i[None, :]
    mask = wanted[:, None] & inside[None, :]
    weights = tl.load(weights_at, mask=mask, other=0.0)
    if GATED:
        second = tl.load(weights_at + num_out * num_in, mask=mask, other=0.0)
    if NORM:
        scale = tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)
    await_turn(OVERLAP)
    value = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        stream = tl.load(residual + col, mask=wanted, other=0.0)
    if ADD:
        # Rounded as the residual stream is stored, so that the norm is of what the next layer will see.
        value = (value + tl.load(delta + i, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        if tl.program_id(0) == 0:
            tl.store(total + i, value.to(dtype), mask=inside)
    if NORM:
        value = value * tl.rsqrt(tl.sum(value * value, 0) / num_in + eps) * scale
        value = value.to(dtype).to(tl.float32)
    result = tl.sum(weights.to(tl.float32) * value[None, :], 1)
    if BIAS:
        result += tl.load(bias + col, mask=wanted, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(second.to(tl.float32) * value[None, :], 1)
        if BIAS:
            up += tl.load(bias + num_out + col, mask=wanted, other=0.0).to(tl.float32)
        result = _gated(result, up, dtype)
    if RESIDUAL:
        result = _added(stream, result)
    tl.store(out + col, result.to(dtype), mask=wanted)


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x, weight, bias, residual, out, num_rows, num_in, num_out,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
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
    await_turn(OVERLAP)
    if RESIDUAL:
        # Asked for together with the first of x, so that it is there when the product is.
        stream = tl.load(residual + place, mask=mask, other=0.0)
    result = tl.zeros([ROWS, COLS], tl.float32)
    up = tl.zeros([ROWS, COLS], tl.float32)
    for first in tl.range(0, num_in, DEPTH):
        i = first + tl.arange(0, DEPTH)
        value = tl.load(rows_at + i[None, :], mask=(i < num_in)[None, :], other=0.0)
        weights_at = columns_at[None, :] + i[:, None]
        weights = tl.load(weights_at, mask=(i < num_in)[:, None], other=0.0)
        result = tl.dot(value, weights, result, input_precision=PRECISION)
        if GATED:
            second = tl.load(weights_at + second_at, mask=(i < num_in)[:, None], other=0.0)
            up = tl.dot(value, second, up, input_precision=PRECISION)
    if BIAS:
        result += tl.load(bias + col, mask=col < num_out, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up += tl.load(bias + num_out + col, mask=col < num_out, other=0.0).to(tl.float32)[None, :]
        result = _gated(result, up, dtype)
    if RESIDUAL:
        result = _added(stream, result)
    tl.store(out + place, result.to(dtype), mask=mask)


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    delta: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x @ weight.T + bias, where x [..., in] may first be made of something else; and that x.

    With `norm`, an RMSNorm's weight and eps, the product is that of the normed x; with `delta` as well
    x + delta takes x's place, and is returned. With `gated` the product is gate and up side by side, and
    silu(gate) * up is returned instead. With `residual` [..., out] what is returned has that added to it.
    """
    assert delta is None or norm is not None, "what x lacks is added by the norm that follows it"
    num_out, num_in = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    x = x.contiguous()
    num_rows = x.numel() // num_in
    out = torch.empty(*x.shape[:-1], num_out, dtype=x.dtype, device=x.device)
    added = x if residual is None else residual.contiguous()
    options = {"GATED": gated, "BIAS": bias is not None, "RESIDUAL": residual is not None}
    options |= overlap(x.device)
    if num_rows == 1 and weight.numel() <= _SMALL and num_in <= _LONGEST:
        total = x if delta is None else torch.empty_like(x)
        depth = triton.next_power_of_2(num_in)
        cols = max(1, min(8, (8192 if gated else 16384) // depth))
        _row_kernel[(triton.cdiv(num_out, cols),)](
            x, x if delta is None else delta.contiguous(), x if norm is None else norm[0], weight,
            x if bias is None else bias, added, out, total, num_in, num_out, 0.0 if norm is None else norm[1],
            COLS=cols, DEPTH=depth, ADD=delta is not None, NORM=norm is not None, num_warps=4, **options,
        )  # fmt: skip
        return out, total
    total = x
    if norm is not None:
        x, total = (rms_norm(x, *norm), x) if delta is None else add_rms_norm(x, delta, *norm)
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    cols, depth, stages = _tile(rows, weight, gated)
    _rows_kernel[(triton.cdiv(num_out, cols), triton.cdiv(num_rows, rows))](
        x, weight, x if bias is None else bias, added, out, num_rows, num_in, num_out,
        ROWS=rows, COLS=cols, DEPTH=depth, LINE=_LINE // x.itemsize, LINES=_LINES,
        PRECISION=precision(x.dtype), num_warps=4, num_stages=stages, **options,
    )  # fmt: skip
    return out, total


def _tile(rows: int, weight: Tensor, gated: bool) -> tuple[int, int, int]:
    """Columns and depth of a program's tile, and how many are under way: what was fastest on an H200, cut
    down to what the GPU holds."""
    sms, shared = gpu_size(weight.device)
    # Where tiles of 32 columns are few enough for all to run at once, each needs more under way.
    few = weight.shape[0] <= 32 * sms
    if weight.dtype == torch.float32:
        cols, depth, stages = 16, 32, 4
    elif weight.numel() <= _SMALL:
        cols, depth, stages = 16, 128, 4
    elif rows == 16:
        cols, depth, stages = 32, 256, 6 if few else 4
    else:
        cols, depth, stages = (32, 128, 6) if few else (64, 128, 4)
    stage = (rows + cols * (2 if gated else 1)) * depth * weight.itemsize
    return cols, depth, max(1, min(stages, shared // stage))


def covers(x: Tensor, weight: Tensor) -> bool:
    """Whether `few_rows` is for this product."""
    num_rows = x.numel() // x.shape[-1]
    if weight.numel() <= _SMALL:
        return num_rows <= MOST_ROWS
    # A library does better by a large matrix where tensor cores do nothing: a single row, and fp32.
    return 1 < num_rows <= MOST_ROWS and x.dtype != torch.float32
