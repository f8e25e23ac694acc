"""Rows of a table in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, overlap


@triton.jit
def _embed_kernel(tokens, table, out, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_turn(OVERLAP)
    place, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(table + tl.load(tokens + place) * size + i, mask=i < size)
    tl.store(out + place * size + i, value, mask=i < size)


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """The rows of table [V, E] that tokens, int64 [...], name: [..., E]."""
    size = table.shape[1]
    out = torch.empty(*tokens.shape, size, dtype=table.dtype, device=table.device)
    _embed_kernel[(tokens.numel(), triton.cdiv(size, 1024))](
        tokens.contiguous(), table, out, size, BLOCK=1024, **overlap(table.device)
    )
    return out
