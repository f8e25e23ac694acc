"""The residual stream between two products, and its RMSNorm in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap

# The most rows that count as few. With more, a library's products are faster and launches do not matter.
MOST_ROWS = 64

Norm = tuple[Tensor, float]
"""An RMSNorm's weight [E] and eps."""


def most_rows(num_rows: int) -> int:
    """How many rows there is room for, where there are so many: few different numbers for the compiler."""
    return max(MOST_ROWS, triton.next_power_of_2(num_rows))


class Ahead(NamedTuple):
    """What the next norm needs. The kernel that makes the stream computes it, which saves a launch."""

    factor: Tensor
    """The norm's weight [E]."""
    scaled: Tensor
    """The stream times the factor."""
    squares: Tensor
    """Sums of squares over parts of the stream's numbers, fp32 [parts, rows], with `most_rows` rows; only the
    stream's own rows are set."""

    @classmethod
    def empty(cls, factor: Tensor, stream: Tensor, num_parts: int) -> Ahead:
        num_rows = most_rows(stream.numel() // stream.shape[-1])
        squares = stream.new_empty(num_parts, num_rows, dtype=torch.float32)
        return cls(factor, torch.empty_like(stream), squares)


@dataclass(frozen=True)
class Residual:
    """The residual stream between two products."""

    x: Tensor
    """[..., E]"""
    delta: Tensor | None = None
    """What the next norm still has to add to x, if a library's product made it."""
    ahead: Ahead | None = None


@launched
@triton.jit
def _norm_kernel(
    x, residual, weight, normed, total, size, eps, BLOCK: tl.constexpr, ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < size
    factor = tl.load(weight + i, mask=inside, other=0.0)
    await_turn(OVERLAP)
    value = tl.load(x + row * size + i, mask=inside, other=0.0)
    if ADD:
        # Round as the stored stream is rounded, so that the norm sees the same numbers as the next layer.
        value = (value.to(tl.float32) + tl.load(residual + row * size + i, mask=inside, other=0.0)).to(
            value.dtype
        )
        tl.store(total + row * size + i, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    result = value * scale * factor
    tl.store(normed + row * size + i, result.to(normed.dtype.element_ty), mask=inside)


def norm_stream(stream: Residual, norm: Norm) -> tuple[Tensor, Residual]:
    """The normed stream, and the complete stream."""
    if stream.delta is None:
        return rms_norm(stream.x, *norm), stream
    normed, x = add_rms_norm(stream.x, stream.delta, *norm)
    return normed, Residual(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., E] by weight [E], computed in fp32."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, both [..., E]; and that sum, which is the new residual stream."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    size = x.shape[-1]
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    added = x if residual is None else residual.contiguous()
    _norm_kernel[(x.numel() // size,)](
        x, added, weight, normed, total, size, eps,
        BLOCK=triton.next_power_of_2(size), ADD=residual is not None, num_warps=8 if size > 1024 else 4,
        **overlap(x.device),
    )  # fmt: skip
    return normed, total
