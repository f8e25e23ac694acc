"""From the residual stream to rotated queries, and to keys and values in the cache, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, overlap
from longspec.kernels.linear import fetch_columns, is_small, multiply, normed_operand, tile_of
from longspec.kernels.norm import MOST_ROWS, Norm, Stream

# Whether rope and the writing into the cache go without a launch of their own.
FOLD_ROPE = True
# A program multiplies so many rows by two times 16 columns: as many bytes of the one as of the other, and of
# 64 rows twice as many programs as if it took them all.
_ROWS = 32


@triton.jit
def _put(at, d, first, second, mask, D: tl.constexpr):
    """Store numbers d of heads, and those half a head behind them."""
    tl.store(at + d[None, :], first, mask=mask)
    tl.store(at + d[None, :] + D // 2, second, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_parts", "num_heads", "num_kv_heads", "num_tokens"])
def _heads_kernel(
    x, squares, weight, bias, table, positions, entries, q, keys, values,
    table_half, k_b, k_h, k_s, v_b, v_h, v_s,
    num_rows, num_parts, num_in, num_heads, num_kv_heads, num_tokens, eps,
    D: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    PARTS: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """COLS numbers of one head, and those half a head behind them, with which rope rotates them."""
    pieces: tl.constexpr = D // 2 // COLS
    head, row = tl.program_id(0) // pieces, tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(0) % pieces * COLS + tl.arange(0, COLS)
    dtype = x.dtype.element_ty
    # What is outside reads the last one again: nobody keeps it.
    real = tl.minimum(row, num_rows - 1)
    col = head * D + d
    columns_at = weight + col.to(tl.int64) * num_in
    second_at = num_in.to(tl.int64) * (D // 2)
    fetch_columns(columns_at, second_at, num_in, LINE, LINES, True, OVERLAP)
    # Where the tokens stand was known before the stream was.
    position, entry = tl.load(positions + real), tl.load(entries + real)[:, None]
    angles_at = table + position[:, None] * D + d[None, :]
    # Of the table's two halves, cosines are the same and sines differ by their sign.
    cos, sin = tl.load(angles_at), tl.load(angles_at + table_half + D // 2)
    await_turn(OVERLAP)
    first, second = multiply(
        x + real[:, None] * num_in, columns_at, second_at, squares, row, num_parts, num_in, eps,
        ROWS, MOST, COLS, DEPTH, PARTS, NORM, True, PRECISION,
    )  # fmt: skip
    if BIAS:
        first += tl.load(bias + col).to(tl.float32)[None, :]
        second += tl.load(bias + col + D // 2).to(tl.float32)[None, :]
    # Rounded as the projection is where rope is a launch of its own.
    first, second = first.to(dtype), second.to(dtype)
    mask = (row < num_rows)[:, None]
    b = (row // num_tokens).to(tl.int64)[:, None]
    if head >= num_heads + num_kv_heads:
        v_head = (head - num_heads - num_kv_heads).to(tl.int64)
        _put(values + b * v_b + entry * v_s + v_head * v_h, d, first, second, mask, D)
    else:
        one, other = first.to(tl.float32), second.to(tl.float32)
        first, second = (one * cos - other * sin).to(dtype), (other * cos + one * sin).to(dtype)
        if head < num_heads:
            _put(q + (row[:, None] * num_heads + head) * D, d, first, second, mask, D)
        else:
            k_head = (head - num_heads).to(tl.int64)
            _put(keys + b * k_b + entry * k_s + k_head * k_h, d, first, second, mask, D)


def normed_heads(
    stream: Stream,
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor,
    positions: Tensor,
    entries: Tensor,
    keys: Tensor,
    values: Tensor,
) -> tuple[Tensor, Stream]:
    """What `rope_write` returns for the projection of the normed stream; and the stream with nothing lacking.

    positions and entries must be older than the stream (see `longspec.kernels.launch`).
    """
    for places in (positions, entries):
        assert places.is_contiguous(), "a copy would be younger than the stream"
    (B, T, num_in), K, D = stream.x.shape, keys.shape[1], keys.shape[3]
    H = weight.shape[0] // D - 2 * K
    operand, stream = normed_operand(stream, norm)
    q = torch.empty(B, T, H, D, dtype=stream.x.dtype, device=stream.x.device)
    rows = min(_ROWS, max(16, triton.next_power_of_2(B * T)))
    cols, depth, stages = tile_of(rows, weight, True)
    _heads_kernel[((H + 2 * K) * (D // 2 // cols), triton.cdiv(B * T, rows))](
        operand.rows, operand.squares, weight, weight if bias is None else bias, table,
        positions, entries, q, keys, values,
        table.stride(0), *keys.stride()[:3], *values.stride()[:3],
        B * T, operand.num_parts, num_in, H, K, T, norm[1],
        D=D, ROWS=rows, COLS=cols, DEPTH=depth, BIAS=bias is not None,
        num_warps=4, num_stages=stages, **operand.options(depth), **overlap(q.device),
    )  # fmt: skip
    return q, stream


def covers_heads(num_rows: int, weight: Tensor, head_dim: int) -> bool:
    """Whether `normed_heads` is for so many rows."""
    # One row is faster without tensor cores; half a head must be whole tiles of columns.
    return FOLD_ROPE and 1 < num_rows <= MOST_ROWS and is_small(weight) and head_dim % 32 == 0
