"""Matrix products of a few rows with a small matrix, and the small work before them, in one launch.

A small model's products take less time than the launches around them: here residual, RMSNorm and gate are
part of the product that reads their result. Each program makes them again, for its own columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, overlap

# Of more rows, or of larger matrices, a library's products are faster, and the launches do not matter.
MOST_ROWS = 64
MOST_WEIGHTS = 1 << 22


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x, delta, norm, weight, bias, out, total, num_rows, num_in, num_out, eps,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    stride = num_in * 2 if GATE else num_in
    acc = tl.zeros([ROWS, COLS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, num_in, DEPTH):
        i = first + tl.arange(0, DEPTH)
        inside = (row < num_rows)[:, None] & (i < num_in)[None, :]
        value = tl.load(x + row[:, None] * stride + i[None, :], mask=inside, other=0.0)
        part = tl.load(
            weight + col[None, :] * num_in + i[:, None],
            mask=(col < num_out)[None, :] & (i < num_in)[:, None],
            other=0.0,
        )
        if GATE:
            up = tl.load(x + row[:, None] * stride + num_in + i[None, :], mask=inside, other=0.0)
            gate = value.to(tl.float32)
            # Rounded in between, as two operations would.
            value = (gate / (1 + tl.exp(-gate))).to(up.dtype) * up
        if ADD:
            place = row[:, None] * num_in + i[None, :]
            added = tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
            value = (value.to(tl.float32) + added).to(x.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(total + place, value, mask=inside)
        if NORM:
            wide = value.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            scale = tl.load(norm + i, mask=i < num_in, other=0.0).to(tl.float32)
            value = (wide * scale[None, :]).to(x.dtype.element_ty)
        acc = tl.dot(value, part, acc, input_precision=PRECISION)
    if NORM:
        # A row's root mean square is known at the end; that it is one factor for all columns lets it wait.
        acc *= tl.rsqrt(squares / num_in + eps)[:, None]
    if BIAS:
        acc += tl.load(bias + col, mask=col < num_out, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * num_out + col[None, :]
    mask = (row < num_rows)[:, None] & (col < num_out)[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    delta: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gate: bool = False,
) -> tuple[Tensor, Tensor]:
    """x @ weight.T + bias, where x [..., in] may first be made of something else; and that x.

    With `delta` x + delta takes x's place, and is returned. With `norm`, an RMSNorm's weight and eps, the
    product is that of the normed x. With `gate` x is gate and up side by side, [..., 2 in], and the product
    that of silu(gate) * up.
    """
    num_out, num_in = weight.shape
    x = x.contiguous()
    num_rows = x.numel() // x.shape[-1]
    out = torch.empty(*x.shape[:-1], num_out, dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(x)
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    cols = 16 if num_out <= 2048 else 32
    _linear_kernel[(triton.cdiv(num_out, cols), triton.cdiv(num_rows, rows))](
        x, x if delta is None else delta.contiguous(), x if norm is None else norm[0], weight,
        x if bias is None else bias, out, total, num_rows, num_in, num_out, 0.0 if norm is None else norm[1],
        ROWS=rows, COLS=cols, DEPTH=128,
        ADD=delta is not None, NORM=norm is not None, GATE=gate, BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=4,
        **overlap(x.device),
    )  # fmt: skip
    return out, total


def covers(x: Tensor, weight: Tensor) -> bool:
    """Whether `few_rows` is for this product.

    Not in fp16, which a residual stream before its norm may overflow.
    """
    num_rows = x.numel() // x.shape[-1]
    return num_rows <= MOST_ROWS and weight.numel() <= MOST_WEIGHTS and x.dtype != torch.float16
