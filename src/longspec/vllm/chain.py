"""How the draft makes a chain for every row of a batch whose KV cache belongs to another engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.models.draft import GlideDraft
from longspec.models.layers import PLAIN, Ops, Rope
from longspec.models.rope import RopeTable, rotate
from longspec.vllm.ring import BatchRing

CrossAttention = Callable[[int, Tensor], Tensor]
"""Attention of one query a row, [B, H, D], over the KV of the target's layer with this index, as far as it is
verified: everything before the root."""


@dataclass(frozen=True)
class ChainParts:
    """What a chain is made with. The target gives its embedding and its head."""

    draft: GlideDraft
    rope: RopeTable
    ring: BatchRing
    embed: Callable[[Tensor], Tensor]
    """Embeddings [B, T, E] of tokens [B, T]."""
    choose: Callable[[Tensor], Tensor]
    """The best token, int64 [B], for hidden states [B, E]."""


@dataclass(frozen=True)
class Roots:
    """Where the chains begin, and what the draft has not read before them."""

    rows: Tensor
    """Of the ring, int64 [B]."""
    positions: Tensor
    """Of the roots, int64 [B]. The target's KV holds everything before them."""
    tokens: Tensor
    """The root, the token before it and so on, int64 [B, T]."""
    num_unread: Tensor
    """How many of them the ring lacks, the root among them, int64 [B]."""
    feature: Tensor
    """The target's final hidden state at the token before the root, [B, E]."""


@dataclass(frozen=True)
class _RingPass:
    """The draft's pass over one token a row, after tokens that only leave their keys and values."""

    parts: ChainParts
    rows: Tensor
    """[B]"""
    goals: Tensor
    """The rows that the keys and values go to, [B, T] or [B, 1]."""
    positions: Tensor
    """[B, T]"""
    rope: Rope
    cross: CrossAttention
    ops: Ops = PLAIN

    def attend_self(self, qkv: Tensor) -> Tensor:
        q, k, v = self.parts.draft.heads(qkv, self.rope)
        self.parts.ring.put(self.goals, self.positions, k, v)
        return self.parts.ring.attend(q[:, 0], self.rows, self.positions[:, 0]).flatten(1)[:, None]

    def attend_cross(self, queries: Tensor) -> Tensor:
        draft = self.parts.draft
        cos, sin = (part[:, :1] for part in self.rope)
        heads = rotate(queries.unflatten(-1, (-1, draft.head_dim)), cos, sin)[:, 0]
        layers = draft.config.layers_of(draft.target_config)
        outs = [self.cross(layer, q) for q, layer in zip(heads.chunk(len(layers), 1), layers, strict=True)]
        return torch.cat(outs, 1).flatten(1)[:, None]


def draft_chain(parts: ChainParts, roots: Roots, num_tokens: int, cross: CrossAttention) -> Tensor:
    """The next `num_tokens` tokens of each row, int64 [B, n], as the draft expects them."""
    back = torch.arange(roots.tokens.shape[1], device=roots.tokens.device)
    tokens, positions = roots.tokens, (roots.positions[:, None] - back).clamp(min=0)
    goals = torch.where(back < roots.num_unread[:, None], roots.rows[:, None], parts.ring.dump_row)
    features = parts.draft.features(roots.feature[:, None], num_tokens)
    found: list[Tensor] = []
    hidden: Tensor | None = None
    for feature in features:
        run = _RingPass(parts, roots.rows, goals, positions, parts.rope(positions), cross)
        x = parts.embed(tokens)
        stream = x[:, :1] if feature is None else x[:, :1] + feature
        if hidden is not None and parts.draft.parent_reader is not None:
            stream = stream + run.ops.normed_linear(parts.draft.parent_reader, hidden)[0]
        hidden = parts.draft.read(x, stream, run)
        found.append(parts.choose(hidden[:, 0]))
        tokens, goals = found[-1][:, None], roots.rows[:, None]
        positions = roots.positions[:, None] + len(found)
    return torch.stack(found, 1)


def read_text(parts: ChainParts, row: int, tokens: Tensor, first: int) -> None:
    """Compute the keys and values of tokens [T] at positions `first`, `first` + 1, ..., and write them into a
    row of the ring."""
    positions = torch.arange(first, first + len(tokens), device=tokens.device)[None]
    qkv = parts.draft.enter(parts.embed(tokens[None]), PLAIN)
    _, k, v = parts.draft.heads(qkv, parts.rope(positions))
    parts.ring.put(torch.full_like(positions[:, :1], row), positions, k, v)
