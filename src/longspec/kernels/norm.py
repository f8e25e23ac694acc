"""Residual and RMSNorm in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, overlap


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
        # Rounded as the residual stream is stored, so that the norm is of what the next layer will see.
        value = (value.to(tl.float32) + tl.load(residual + row * size + i, mask=inside, other=0.0)).to(
            value.dtype
        )
        tl.store(total + row * size + i, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    result = value * scale * factor
    tl.store(normed + row * size + i, result.to(normed.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., E] by weight [E], computed in fp32."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, both [..., E], and that sum, which is the residual stream from here on."""
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
