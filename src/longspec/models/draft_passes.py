"""The draft's passes in decoding: attention to its ring, to its tree and to the target's pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.attention import Attention, AttentionPlan
from longspec.cache import DraftRing, Pages
from longspec.models.draft import GlideDraft
from longspec.models.layers import PLAIN, Ops, Rope
from longspec.models.rope import rotate


@dataclass(frozen=True)
class PlainDraftPass:
    """The root or one level of nodes, with torch's operations."""

    draft: GlideDraft
    ring: DraftRing
    pages: Pages
    attention: Attention
    plan: AttentionPlan
    rope: Rope
    """Of all projected tokens; the queries come first."""
    entries: Tensor | None
    """Where in the ring the keys and values go, [B, T]; None: after the ring, as nodes from `first` on."""
    first: int
    sees: Tensor
    """Which entries the queries see: how many of the first ones, [B], or a mask [B, n, S]."""
    num_queries: int
    ops: Ops = PLAIN

    def attend_self(self, qkv: Tensor) -> Tensor:
        q, k, v = self.draft.heads(qkv, self.rope)
        if self.entries is None:
            self.ring.put_nodes(self.first, k, v)
        else:
            self.ring.put(self.entries, k, v)
        attend = self.attention.filled if self.sees.ndim == 1 else self.attention.masked
        return attend(q[:, : self.num_queries], self.ring.keys, self.ring.values, self.sees)[0].flatten(2)

    def attend_cross(self, queries: Tensor) -> Tensor:
        # Each node of a round lags at least 1, so it may see the whole prefix.
        cos, sin = (part[:, : self.num_queries] for part in self.rope)
        heads = rotate(queries.unflatten(-1, (-1, self.draft.head_dim)), cos, sin)
        cross = _cross_pages(self.pages, self.draft.config.layers_of(self.draft.target_config))
        outs = [
            self.attention.prefix(q, *pair, self.plan)[0]
            for q, pair in zip(heads.to(self.pages.keys.dtype).chunk(len(cross), 2), cross, strict=True)
        ]
        return torch.cat(outs, 2).flatten(2).to(queries.dtype)


@dataclass(frozen=True)
class FusedDraftPass:
    """The root or one level of nodes, with our own kernels."""

    draft: GlideDraft
    ring: DraftRing
    pages: Pages
    attention: Attention
    plan: AttentionPlan
    table: Tensor
    """`RopeTable.table`."""
    parents: Tensor
    """Of the tree's nodes so far, int64 [B, N]."""
    positions: Tensor
    """Of all projected tokens, [B, T]."""
    entries: Tensor
    queries_at: Tensor
    """The positions of the queries, [B, n]."""
    first: int
    depth: int
    ops: Ops

    def attend_self(self, qkv: Tensor) -> Tensor:
        from longspec.kernels.masked import Nodes, masked
        from longspec.kernels.rope import rope_write

        ring = self.ring
        q = rope_write(qkv, self.table, self.positions, self.entries, ring.keys, ring.values)
        nodes = Nodes(ring.positions, ring.window, self.plan.lengths, self.parents, self.first, self.depth)
        return masked(q[:, : self.queries_at.shape[1]], ring.keys, ring.values, nodes)[0].flatten(2)

    def attend_cross(self, queries: Tensor) -> Tensor:
        from longspec.kernels.rope import rope_write

        # Only queries are rotated, so the keys and values have no heads.
        none = self.ring.keys[:, :0]
        heads = rope_write(queries, self.table, self.queries_at, self.queries_at, none, none)
        cross = _cross_pages(self.pages, self.draft.config.layers_of(self.draft.target_config))
        outs = [
            self.attention.prefix(q, *pair, self.plan)[0]
            for q, pair in zip(heads.chunk(len(cross), 2), cross, strict=True)
        ]
        return (outs[0] if len(outs) == 1 else torch.cat(outs, 2)).flatten(2)


def _cross_pages(pages: Pages, layers: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """The keys and values of these layers. Evenly spaced layers give one pair [C, K, S, D], so that one call
    attends to all of them; other layers give one pair each."""
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    if step > 0 and layers == tuple(range(layers[0], layers[-1] + 1, step)):
        every = slice(layers[0], layers[-1] + 1, step)
        return [(pages.keys[every], pages.values[every])]
    return [pages.layer(layer) for layer in layers]
