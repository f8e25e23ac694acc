"""Rows of a table in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, overlap


@triton.jit(do_not_specialize=["num_tokens"])
def _embed_kernel(
    tokens, table, added, out, total, num_tokens, tokens_b, size,
    BLOCK: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    place, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = place // num_tokens
    token = tl.load(tokens + b * tokens_b + place % num_tokens)
    value = tl.load(table + token * size + i, mask=i < size, other=0.0)
    tl.store(out + place * size + i, value, mask=i < size)
    if ADD:
        more = tl.load(added + b * size + i, mask=i < size, other=0.0)
        tl.store(total + place * size + i, value + more, mask=i < size)


def embed(tokens: Tensor, table: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rows of table [V, E] that tokens, int64 [B, T], name, [B, T, E]; and their sum with `added`
    [B, 1, E], or themselves again."""
    (B, T), size = tokens.shape, table.shape[1]
    assert tokens.stride(1) == 1 or T == 1, "a row's tokens must lie side by side"
    out = torch.empty(B, T, size, dtype=table.dtype, device=table.device)
    total = out if added is None else torch.empty_like(out)
    _embed_kernel[(B * T, triton.cdiv(size, 1024))](
        tokens, table, table if added is None else added.contiguous(), out, total, T, tokens.stride(0), size,
        BLOCK=1024, ADD=added is not None, **overlap(table.device),
    )  # fmt: skip
    return out, total
