"""Merge attention over two disjoint sets of keys by their lse, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import launched

_ROWS = 16


@launched
@triton.jit
def _merge_kernel(
    one, one_lse, two, two_lse, out, lse, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    real = row < num_rows
    first = tl.load(one_lse + row, mask=real, other=-float("inf"))
    second = tl.load(two_lse + row, mask=real, other=-float("inf"))
    high = tl.maximum(first, second)
    # If both sides saw nothing, the weights would be nan. Make them 0.
    base = tl.where(high == -float("inf"), 0.0, high)
    first, second = tl.exp(first - base), tl.exp(second - base)
    total = first + second
    scale = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
    place, mask = row[:, None] * D + d[None, :], real[:, None] & (d < D)[None, :]
    left = tl.load(one + place, mask=mask, other=0.0).to(tl.float32) * (first * scale)[:, None]
    right = tl.load(two + place, mask=mask, other=0.0).to(tl.float32) * (second * scale)[:, None]
    tl.store(out + place, (left + right).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + row, base + tl.log(total), mask=real)


def merge(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same as `longspec.attention.base.merge`, for results [..., D] and their lse [...]."""
    (out_one, lse_one), (out_two, lse_two) = one, two
    D, num_rows = out_one.shape[-1], lse_one.numel()
    out, lse = (
        torch.empty(out_one.shape, dtype=out_one.dtype, device=out_one.device),
        lse_one.new_empty(lse_one.shape),
    )
    _merge_kernel[(triton.cdiv(num_rows, _ROWS),)](
        out_one.contiguous(), lse_one.contiguous(), out_two.contiguous(), lse_two.contiguous(), out, lse,
        num_rows, D=D, BLOCK_D=triton.next_power_of_2(D), ROWS=_ROWS,
    )  # fmt: skip
    return out, lse
