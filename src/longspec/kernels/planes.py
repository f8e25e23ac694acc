"""Products of rows in half precision with int8 weights, as products of integers.

A row is rounded to 16 bits by a scale of its own and split into two planes of bytes: a number is 256 times
its high byte plus its low one. Tensor cores multiply both planes with the weights as they are stored, so no
weight is converted, and their sums are integers. Integers have the same sum in any order: with any tile, and
however many programs share the depth, a row's product has the same bits. The error is a hundredth of that of
rows in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longspec.kernels.launch import await_turn, launched, overlap
from longspec.kernels.norm import MOST_ROWS, Norm, Residual
from longspec.kernels.products import (
    LINE,
    begin,
    count_lines,
    count_shares,
    few_tile_rows,
    finish,
    is_small,
    load_tile,
    room_for_shares,
    sum_shares,
)
from longspec.kernels.tiling import can_copy_rows, copies_tiles, gpu_size

# A row is rounded to integers from -32,512 to 32,512 (256 * 127). A row of zeros has no largest value to
# divide by, so the divisor is never below `_TINY`.
_LARGEST, _TINY = tl.constexpr(32512.0), tl.constexpr(1e-30)


class Planes(NamedTuple):
    """Rows rounded to 16 bits."""

    values: Tensor
    """int8 [2 * rows, in]: row r is scales[r] * (256 * values[2 r] + values[2 r + 1])."""
    scales: Tensor
    """fp32 [rows]"""


@dataclass(frozen=True)
class PlaneTile:
    """A program's share of a product of planes."""

    num_rows: int
    num_cols: int
    """So many of the gate and so many of what it multiplies."""
    depth: int
    """How much of the inner dimension is read at a time."""
    num_stages: int
    """How many such reads are in flight."""
    num_warps: int
    num_shares: int = 1
    """How many programs share the inner dimension. The last one of a tile adds up their sums."""
    num_lines: int = 8
    """How many cache lines of each column are fetched early."""


def uses_planes(dtype: torch.dtype, weight: Tensor, scales: Tensor) -> bool:
    """Whether rows of this dtype are multiplied as planes. Rows in fp32 are not, because 16 bits are less."""
    return weight.dtype == torch.int8 and scales.shape[1] == 1 and dtype != torch.float32


@triton.jit
def _larger(one, other):
    """Not as in `tl.max`, which ignores nan."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def round_row(value) -> tl.tuple:
    """A row as integers of 16 bits, and the scale that they have to be multiplied by. If the row has nan or
    inf, all of its product becomes nan."""
    most = tl.reduce(tl.abs(value), None, _larger)
    most = tl.where(most < _TINY, _TINY, most)
    return tl.floor(value * (_LARGEST / most) + 0.5).to(tl.int32), most / _LARGEST


@triton.jit
def split_bytes(rounded) -> tl.tuple:
    """The high and the low bytes of integers of 16 bits."""
    high = (rounded + 128) >> 8
    return high, rounded - high * 256


@triton.jit
def join_sums(high, low) -> tl.tensor:
    """The sum of products from the sums of both planes."""
    return high.to(tl.float32) * 256.0 + low.to(tl.float32)


@launched
@triton.jit
def planes_kernel(
    x, delta, norm, planes, scales, total, size, eps,
    BLOCK: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """One row. Its bits do not depend on the number of rows, because each has a program of the same shape."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < size
    if NORM:
        factor = tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)
    await_turn(OVERLAP)
    value = tl.load(x + row * size + i, mask=inside, other=0.0)
    if ADD:
        # Round as the stored stream is rounded, so that the norm sees the same numbers as the next layer.
        added = tl.load(delta + row * size + i, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + added).to(value.dtype)
        tl.store(total + row * size + i, value, mask=inside)
    value = value.to(tl.float32)
    late = 1.0
    if NORM:
        late = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
        value = value * factor
    rounded, scale = round_row(value)
    high, low = split_bytes(rounded)
    tl.store(planes + 2 * row * size + i, high.to(tl.int8), mask=inside)
    tl.store(planes + (2 * row + 1) * size + i, low.to(tl.int8), mask=inside)
    tl.store(scales + row, scale * late)


def make_planes(stream: Residual, norm: Norm | None) -> tuple[Planes, Residual]:
    """The stream in planes, normed if there is a norm; and the complete stream."""
    x = stream.x.contiguous()
    size = x.shape[-1]
    num_rows = x.numel() // size
    values = torch.empty(2 * num_rows, size, dtype=torch.int8, device=x.device)
    planes = Planes(values, torch.empty(num_rows, dtype=torch.float32, device=x.device))
    complete = stream if stream.delta is None else Residual(torch.empty_like(x))
    planes_kernel[(num_rows,)](
        x, x if stream.delta is None else stream.delta.contiguous(), x if norm is None else norm[0],
        *planes, complete.x, size, 0.0 if norm is None else norm[1],
        BLOCK=triton.next_power_of_2(size), ADD=stream.delta is not None, NORM=norm is not None,
        num_warps=16 if size > 4096 else 8 if size > 1024 else 4, **overlap(x.device),
    )  # fmt: skip
    return planes, complete


@triton.jit
def _joined(total, scale):
    """A tile of sums [C, 2 R] of both planes as a product [R, C], times the scales of the columns."""
    high, low = tl.split(tl.reshape(total, [total.shape[0], total.shape[1] // 2, 2]))
    return tl.trans(join_sums(high, low) * scale[:, None])


@launched
@triton.jit(do_not_specialize=["num_rows"])
def planes_product_kernel(
    planes, planes_box, row_scales, weight, weight_box, scales, bias, residual, out, shares, num_done,
    num_rows, num_in, num_out,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, SHARES: tl.constexpr, LINE: tl.constexpr,
    LINES: tl.constexpr, BOXES: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of the product, or of one program's share of its depth. The columns of its dot are the high and
    the low plane of each row. With BOXES the hardware copies whole tiles and reads 0 outside.

    Where sums are not fp32, the compiler (Triton 3.7) has each dot end before the next one begins, so tiles
    are deep."""
    start, end = 0, num_in
    if SHARES > 1:
        share = tl.cdiv(num_in, SHARES * DEPTH) * DEPTH
        start = tl.program_id(2) * share
        end = tl.minimum(start + share, num_in)
    column = tl.minimum(tl.program_id(0) * COLS + tl.arange(0, COLS), num_out - 1)
    # Before the turn, so that the end of the product does not wait for them.
    column_scale, second_scale = tl.load(scales + column), 0.0
    if GATED:
        second_scale = tl.load(scales + num_out + column)
    _, col, planes_at, columns_at, second_at, _ = begin(
        planes, weight, weight, start, 2 * num_rows, num_in, num_out,
        2 * ROWS, COLS, LINE, LINES, GATED, False, OVERLAP,
    )  # fmt: skip
    result = tl.zeros([COLS, 2 * ROWS], tl.int32)
    up = tl.zeros([COLS, 2 * ROWS], tl.int32)
    for first in tl.range(start, end, DEPTH):
        if BOXES:
            value = planes_box.load([tl.program_id(1) * 2 * ROWS, first])
            weights = weight_box.load([tl.program_id(0) * COLS, first])
        else:
            i = first + tl.arange(0, DEPTH)
            inside = (i < num_in)[None, :]
            value = tl.load(planes_at[:, None] + i[None, :], mask=inside, other=0)
            weights_at = columns_at[:, None] + i[None, :]
            weights = tl.load(weights_at, mask=inside, other=0)
        result = tl.dot(weights, tl.trans(value), result, out_dtype=tl.int32)
        if GATED:
            if BOXES:
                second = weight_box.load([num_out + tl.program_id(0) * COLS, first])
            else:
                second = tl.load(weights_at + second_at, mask=inside, other=0)
            up = tl.dot(second, tl.trans(value), up, out_dtype=tl.int32)
    is_last = True
    if SHARES > 1:
        result, is_last = sum_shares(result, shares, num_done, SHARES)
    if is_last:
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        scale = tl.load(row_scales + row, mask=row < num_rows, other=0.0)
        second_product, stream = 0.0, 0.0
        if GATED:
            second_product = _joined(up, second_scale)
        if RESIDUAL:
            stream = load_tile(residual, row, col, num_rows, num_out)
        finish(
            _joined(result, column_scale), second_product, scale, bias, stream, 0.0, out, out, out,
            row, col, num_rows, num_out, 0, True, GATED, BIAS, RESIDUAL, False, False,
        )  # fmt: skip


def multiply_planes(
    planes: Planes,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    gated: bool,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """As `longspec.kernels.linear.few_rows`: [rows, out] in `dtype`."""
    num_out, num_in = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    num_rows = len(planes.scales)
    out = torch.empty(num_rows, num_out, dtype=dtype, device=weight.device)
    tile = tile_of_planes(num_rows, weight, gated)
    num_shares = count_shares(num_in, tile.depth, tile.num_shares)
    assert num_shares == 1 or not gated, "a gate needs the sums of all shares"
    grid = (triton.cdiv(num_out, tile.num_cols), triton.cdiv(num_rows, tile.num_rows), num_shares)
    planes_box, weight_box = planes.values, weight
    if boxes := copies_tiles(weight.device) and can_copy_rows(weight):
        planes_box = TensorDescriptor.from_tensor(planes.values, [2 * tile.num_rows, tile.depth])
        weight_box = TensorDescriptor.from_tensor(weight, [tile.num_cols, tile.depth])
    planes_product_kernel[grid](
        planes.values, planes_box, planes.scales, weight, weight_box, scales,
        out if bias is None else bias, out if residual is None else residual.contiguous(), out,
        *room_for_shares(grid, 2 * tile.num_rows * tile.num_cols, out, torch.int32),
        num_rows, num_in, num_out,
        ROWS=tile.num_rows, COLS=tile.num_cols, DEPTH=tile.depth, SHARES=num_shares, LINE=LINE,
        LINES=tile.num_lines, BOXES=boxes, GATED=gated, BIAS=bias is not None, RESIDUAL=residual is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap(weight.device),
    )  # fmt: skip
    return out


def tile_of_planes(num_rows: int, weight: Tensor, gated: bool) -> PlaneTile:
    """The fastest tile for 16 and for 64 rows on an H200, with fewer stages if the GPU cannot hold them. 32
    rows have the tile of 64."""
    sms, shared = gpu_size(weight.device)
    rows = few_tile_rows(num_rows)
    if num_rows > MOST_ROWS:
        tile = PlaneTile(64, 128, 128, 4, 8)
    elif is_small(weight):
        tile = PlaneTile(rows, 16, 128, 4, 4, num_lines=count_lines(weight))
    elif gated:
        tile = PlaneTile(rows, 64, 256 if rows == 16 else 128, 3, 4, num_lines=4)
    elif rows > 16 and weight.shape[0] > 256 * sms:
        tile = PlaneTile(rows, 128, 128, 3, 4)
    else:
        # As many programs as run at once, each with enough of the depth.
        num_shares = max(1, min(sms // triton.cdiv(weight.shape[0], 64), weight.shape[1] // 1024))
        tile = PlaneTile(rows, 64, 256, 4, 4, num_shares)
    stage = (2 * tile.num_rows + tile.num_cols * (2 if gated else 1)) * tile.depth
    return replace(tile, num_stages=max(1, min(tile.num_stages, shared // stage)))
