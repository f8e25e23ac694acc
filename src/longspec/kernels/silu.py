"""The gate of the feed-forward in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap

_BLOCK = 1024


@launched
@triton.jit
def _silu_kernel(gate_up, out, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_turn(OVERLAP)
    row, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    gate = tl.load(gate_up + row * 2 * size + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + i, mask=inside, other=0.0)
    # Round in between, as two separate operations do.
    gated = (gate / (1 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + row * size + i, gated * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [..., I], of gate and up side by side [..., 2 I]."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    _silu_kernel[(triton.cdiv(size, _BLOCK), out.numel() // size)](
        gate_up, out, size, BLOCK=_BLOCK, **overlap(gate_up.device)
    )  # fmt: skip
    return out
