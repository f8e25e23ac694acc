"""Embed tokens in one launch; for a level of a tree, also compute positions and entries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap
from longspec.kernels.norm import Ahead, Residual, most_rows

_BLOCK = 1024
Parents = tuple[Tensor, int, Tensor]
"""The parents of a level's nodes, int64 [B, T]; the first node of the level above; and a row for each node of
that level, [B, n, E]."""


@launched
@triton.jit(do_not_specialize=["num_tokens", "depth", "entry", "parents_b", "first_above", "num_above"])
def _embed_kernel(
    tokens, table, added, factor, scaled, squares, out, total, lengths, positions, entries, parents, above,
    num_tokens, tokens_b, size, depth, entry, parents_b, first_above, num_above,
    BLOCK: tl.constexpr, MOST: tl.constexpr, ADD: tl.constexpr, AHEAD: tl.constexpr, LEVEL: tl.constexpr,
    PARENTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    place, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b, index = place // num_tokens, place % num_tokens
    if AHEAD:
        scale = tl.load(factor + i, mask=i < size, other=0.0).to(tl.float32)
    await_turn(OVERLAP)
    token = tl.load(tokens + b * tokens_b + index)
    if LEVEL and tl.program_id(1) == 0:
        tl.store(positions + place, tl.load(lengths + b) + depth)
        tl.store(entries + place, entry + index)
    value = tl.load(table + token * size + i, mask=i < size, other=0.0)
    tl.store(out + place * size + i, value, mask=i < size)
    if ADD or PARENTS:
        more = value.to(tl.float32)
        if ADD:
            more += tl.load(added + b * size + i, mask=i < size, other=0.0).to(tl.float32)
        if PARENTS:
            row = b * num_above + tl.load(parents + b * parents_b + index) - first_above
            more += tl.load(above + row * size + i, mask=i < size, other=0.0).to(tl.float32)
        tl.store(total + place * size + i, more.to(value.dtype), mask=i < size)
    if AHEAD:
        wide = value.to(tl.float32)
        tl.store(scaled + place * size + i, (wide * scale).to(value.dtype), mask=i < size)
        tl.store(squares + tl.program_id(1) * MOST + place, tl.sum(wide * wide, 0))


def embed(
    tokens: Tensor, table: Tensor, added: Tensor | None = None, factor: Tensor | None = None
) -> tuple[Residual, Residual]:
    """The rows [B, T, E] of table [V, E] for tokens, int64 [B, T]; and the same plus `added` [B, 1, E]. With
    `factor`, the weight of the norm that follows, the first has `ahead`."""
    return _launch(tokens, table, added, factor, None, None)


def embed_level(
    tokens: Tensor,
    table: Tensor,
    added: Tensor | None,
    factor: Tensor | None,
    level: tuple[Tensor, int, int],
    parents: Parents | None = None,
) -> tuple[Residual, Residual, Tensor, Tensor]:
    """As `embed`, for the nodes of one level of a tree, which have consecutive entries in a cache. Also
    returns their positions in the text and their entries, int64 [B, T] each.

    `level` is the lengths [B] of the prefix, the depth of the nodes, and the entry of the first node. With
    `parents`, each node also gets the row of its parent added.
    """
    positions, entries = torch.empty(2, *tokens.shape, dtype=torch.int64, device=tokens.device).unbind(0)
    places = (*level, positions, entries)
    return *_launch(tokens, table, added, factor, places, parents), positions, entries


def _launch(
    tokens: Tensor,
    table: Tensor,
    added: Tensor | None,
    factor: Tensor | None,
    level: tuple[Tensor, int, int, Tensor, Tensor] | None,
    parents: Parents | None,
) -> tuple[Residual, Residual]:
    (B, T), size = tokens.shape, table.shape[1]
    assert tokens.stride(1) == 1 or T == 1, "the tokens of a row must be contiguous"
    out = torch.empty(B, T, size, dtype=table.dtype, device=table.device)
    total = out if added is None and parents is None else torch.empty_like(out)
    num_parts = triton.cdiv(size, _BLOCK)
    ahead = None if factor is None else Ahead.empty(factor, out, num_parts)
    lengths, depth, entry, positions, entries = level or (tokens, 0, 0, tokens, tokens)
    parent, first_above, above = parents or (tokens, 0, table[:0, None])
    assert parent.stride(1) == 1 or T == 1, "the parents of a row must be contiguous"
    _embed_kernel[(B * T, num_parts)](
        tokens, table, table if added is None else added.contiguous(), *(ahead or (out, out, out)),
        out, total, lengths, positions, entries, parent, above.contiguous(), T, tokens.stride(0), size, depth,
        entry, parent.stride(0), first_above, above.shape[1],
        BLOCK=_BLOCK, MOST=most_rows(B * T), ADD=added is not None, AHEAD=ahead is not None,
        LEVEL=level is not None, PARENTS=parents is not None, **overlap(table.device),
    )  # fmt: skip
    return Residual(out, ahead=ahead), Residual(total)
