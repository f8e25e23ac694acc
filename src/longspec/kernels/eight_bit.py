"""The product of one row with weights of 8 bits, fused with norm, gate and residual.

It takes as long as reading the weights, so nothing is done with them but what each needs: a conversion and a
multiplication. A row of up to 4,096 weights is one tile, which is loaded before the kernel's turn. Longer
rows are read in parts, of which several are on their way at a time.

A tile of int8 is not converted: every program rounds x to planes (`longspec.kernels.planes`), and one
instruction (dp4a) multiplies four bytes of a plane with four weights. For longer rows that was slower.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, fetch, launched, overlap
from longspec.kernels.planes import join_sums, round_row, split_bytes, uses_planes
from longspec.kernels.products import add_rounded, silu_gate
from longspec.kernels.widen import convert, widen

# The longest row in one tile.
_WHOLE = 4096
# Bytes of a word.
_WORD = 4
# Bytes of a cache line, and how many bytes of a longer row are fetched early.
_LINE, _EARLY = tl.constexpr(128), tl.constexpr(4096)


class RowTile(NamedTuple):
    """A program's share of the product of one row."""

    num_cols: int
    """Halved where a gate is computed, too."""
    depth: int
    """How much of a row that is longer than one tile is read at a time."""
    num_stages: int
    """How many such reads are in flight."""
    num_warps: int


def row_tile(num_in: int) -> RowTile:
    """The tile for rows of this length."""
    return RowTile(8, 1024, 4, 4) if num_in > _WHOLE else RowTile(8, _WHOLE, 1, 4)


@triton.jit
def _scaled(weights, scales, col, first, num_runs, RUN: tl.constexpr, CONVERT: tl.constexpr):
    """A tile of weights [C, D] as fp32; with RUN, times their scales."""
    weights = widen(weights, tl.float32, CONVERT)
    if RUN > 0:
        run = first // RUN + tl.arange(0, weights.shape[1] // RUN)
        inside = (run < num_runs)[None, :]
        factor = tl.load(scales + col[:, None] * num_runs + run[None, :], mask=inside, other=0.0)
        runs = tl.reshape(weights, [weights.shape[0], weights.shape[1] // RUN, RUN])
        weights = tl.reshape(runs * factor[:, :, None], weights.shape)
    return weights


@triton.jit
def _load(pointers, inside, EVEN: tl.constexpr):
    """With EVEN without a mask: for each number that it might leave out, a register would be set to 0."""
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _write(
    product, up, bias, residual, out, col, wanted, num_out, dtype: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Finish columns after their product: bias, gate and residual."""
    if BIAS:
        product += tl.load(bias + col).to(tl.float32)
    if GATED:
        if BIAS:
            up += tl.load(bias + num_out + col).to(tl.float32)
        product = silu_gate(product, up, dtype)
    if RESIDUAL:
        product = add_rounded(tl.load(residual + col), product)
    tl.store(out + col, product.to(out.dtype.element_ty), mask=wanted)


@launched
@triton.jit
def byte_row_kernel(
    x, norm, weight, scales, bias, residual, out, num_in, num_out, eps,
    COLS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr,
    EVEN: tl.constexpr, CONVERT: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Some columns of the product. With WHOLE a tile has all of the depth. With EVEN the depth is a multiple
    of the tile's."""
    col, i = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, DEPTH)
    wanted = col < num_out
    dtype = x.dtype.element_ty
    # Columns outside read the last one again; their results are not stored.
    col = tl.minimum(col, num_out - 1)
    weights_at = weight + col.to(tl.int64)[:, None] * num_in + i[None, :]
    second_at = weights_at + num_out.to(tl.int64) * num_in
    num_runs = 1 if RUN == 0 else num_in // RUN
    result, up = tl.zeros([COLS, DEPTH], tl.float32), tl.zeros([COLS, DEPTH], tl.float32)
    squares = tl.zeros([DEPTH], tl.float32)
    if WHOLE:
        inside = i < num_in
        weights = _load(weights_at, inside[None, :], EVEN)
        if GATED:
            second = _load(second_at, inside[None, :], EVEN)
        if NORM:
            factor = _load(norm + i, inside, EVEN).to(tl.float32)
        await_turn(OVERLAP)
        value = _load(x + i, inside, EVEN).to(tl.float32)
        if NORM:
            squares = value * value
            value = (value * factor).to(dtype).to(tl.float32)
        result = _scaled(weights, scales, col, 0, num_runs, RUN, CONVERT) * value[None, :]
        if GATED:
            up = _scaled(second, scales, num_out + col, 0, num_runs, RUN, CONVERT) * value[None, :]
    else:
        early = tl.arange(0, _EARLY // _LINE) * _LINE
        fetch(weight + col.to(tl.int64)[:, None] * num_in + early[None, :], OVERLAP)
        await_turn(OVERLAP)
        for first in tl.range(0, num_in, DEPTH, num_stages=STAGES):
            inside = first + i < num_in
            weights = _load(weights_at + first, inside[None, :], EVEN)
            value = _load(x + first + i, inside, EVEN).to(tl.float32)
            if NORM:
                squares += value * value
                factor = _load(norm + first + i, inside, EVEN).to(tl.float32)
                value = (value * factor).to(dtype).to(tl.float32)
            result += _scaled(weights, scales, col, first, num_runs, RUN, CONVERT) * value[None, :]
            if GATED:
                second = _load(second_at + first, inside[None, :], EVEN)
                up += _scaled(second, scales, num_out + col, first, num_runs, RUN, CONVERT) * value[None, :]
    late = 1.0
    if NORM:
        late = tl.rsqrt(tl.sum(squares, 0) / num_in + eps)
    product, second_product = tl.sum(result, 1) * late, 0.0
    if RUN == 0:
        product *= tl.load(scales + col)
    if GATED:
        second_product = tl.sum(up, 1) * late
        if RUN == 0:
            second_product *= tl.load(scales + num_out + col)
    _write(
        product, second_product, bias, residual, out, col, wanted, num_out, dtype, GATED, BIAS, RESIDUAL
    )  # fmt: skip


@triton.jit
def _dot4(left, right, DP4A: tl.constexpr):
    """The product of four bytes with four bytes, each a word."""
    if DP4A:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        total = (left >> 24) * (right >> 24)
        for shift in tl.static_range(8, 32, 8):
            total += ((left << shift) >> 24) * ((right << shift) >> 24)
    return total


@triton.jit
def _words(numbers):
    """The lowest bytes of numbers [D, 4] as words [D]."""
    return tl.sum((numbers & 255) << (8 * tl.arange(0, 4))[None, :], 1)


@triton.jit
def _word_sums(weights, high, low, DP4A: tl.constexpr):
    """The products of words of weights [C, D] with both planes [D] of a row."""
    highs, lows = _dot4(weights, high[None, :], DP4A), _dot4(weights, low[None, :], DP4A)
    return join_sums(tl.sum(highs, 1), tl.sum(lows, 1))


@launched
@triton.jit
def word_row_kernel(
    x, norm, weight, scales, bias, residual, out, num_words, num_out, eps,
    COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, DP4A: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Some columns of the product with int8 weights, four of which are a word. With EVEN a tile has as many
    words as a row."""
    col, i = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, DEPTH)
    wanted, inside = col < num_out, i < num_words
    # Columns outside read the last one again; their results are not stored.
    col = tl.minimum(col, num_out - 1)
    weights_at = weight + col.to(tl.int64)[:, None] * num_words + i[None, :]
    place = 4 * i[:, None] + tl.arange(0, 4)[None, :]
    weights, column_scale = _load(weights_at, inside[None, :], EVEN), tl.load(scales + col)
    if GATED:
        second = _load(weights_at + num_out.to(tl.int64) * num_words, inside[None, :], EVEN)
        second_scale = tl.load(scales + num_out + col)
    if NORM:
        factor = _load(norm + place, inside[:, None], EVEN).to(tl.float32)
    await_turn(OVERLAP)
    value = _load(x + place, inside[:, None], EVEN).to(tl.float32)
    late = 1.0
    if NORM:
        late = tl.rsqrt(tl.sum(value * value) / (4 * num_words) + eps)
        value = value * factor
    rounded, scale = round_row(value)
    scale *= late
    high, low = split_bytes(rounded)
    high, low = _words(high), _words(low)
    product, second_product = _word_sums(weights, high, low, DP4A) * scale * column_scale, 0.0
    if GATED:
        second_product = _word_sums(second, high, low, DP4A) * scale * second_scale
    _write(
        product, second_product, bias, residual, out, col, wanted, num_out, x.dtype.element_ty,
        GATED, BIAS, RESIDUAL,
    )  # fmt: skip


def has_dp4a(device: torch.device) -> bool:
    """Whether the device multiplies bytes of words; every GPU does, the interpreter has no such
    instruction."""
    return device.type == "cuda"


def one_row_of_bytes(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    gated: bool,
    residual: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """As `longspec.kernels.linear.few_rows`, for one row x [..., in]."""
    num_out, num_in = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = torch.empty(*x.shape[:-1], num_out, dtype=dtype or x.dtype, device=x.device)
    run = 0 if scales.shape[1] == 1 else num_in // scales.shape[1]
    tile = row_tile(num_in)
    depth, cols = max(tile.depth, run), tile.num_cols // (2 if gated else 1)
    if whole := num_in <= depth:
        depth = triton.next_power_of_2(num_in)
    grid, num_words = (triton.cdiv(num_out, cols),), num_in // _WORD
    around = (x if bias is None else bias, x if residual is None else residual.contiguous(), out)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    options = {
        "COLS": cols, "EVEN": num_in % depth == 0, "NORM": norm is not None, "GATED": gated,
        "BIAS": bias is not None, "RESIDUAL": residual is not None, "num_warps": tile.num_warps,
        **overlap(x.device),
    }  # fmt: skip
    if whole and num_in % _WORD == 0 and uses_planes(x.dtype, weight, scales):
        word_row_kernel[grid](
            x, norm_weight, weight.view(torch.int32), scales, *around, num_words, num_out, eps,
            DEPTH=depth // _WORD, DP4A=has_dp4a(x.device), **options,
        )  # fmt: skip
        return out
    byte_row_kernel[grid](
        x, norm_weight, weight, scales, *around, num_in, num_out, eps,
        DEPTH=depth, STAGES=tile.num_stages, RUN=run, WHOLE=whole, CONVERT=convert(x.device), **options,
    )  # fmt: skip
    return out
