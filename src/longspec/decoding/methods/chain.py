"""A GLIDE chain where the host is at hand: the same tokens as a tree one node wide, by less work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.attention import AttentionPlan
from longspec.decoding.choose import gumbel
from longspec.decoding.loop import DecodeState
from longspec.decoding.methods.glide import Glide
from longspec.decoding.tree import TokenTree
from longspec.models.draft import DraftHead, GlideDraft


@dataclass(frozen=True)
class _Round:
    """What the passes of a round share; one entry for each of them, [B, gamma], where there are several."""

    positions: Tensor
    entries: Tensor
    """Where the queries' own keys and values are in the ring."""
    cos: Tensor
    sin: Tensor
    features: list[Tensor | None]
    prefix: AttentionPlan

    def rope(self, depth: int) -> tuple[Tensor, Tensor]:
        """For the pass at this depth."""
        return self.cos[:, depth : depth + 1], self.sin[:, depth : depth + 1]


class Chain(Glide):
    """While a chain is drafted its nodes stand in the ring itself, as if they were committed.

    The entry that a node takes is that of the position which has just left its window. So no mask is needed:
    what a query sees is the ring, as far as it is filled. What was there is put back after the last pass.
    """

    def __init__(
        self,
        draft: GlideDraft,
        head: DraftHead,
        gamma: int,
        max_nodes: int | None,
        min_confidence: float = 0.0,
    ) -> None:
        super().__init__(draft, head, (1,) * gamma, max_nodes, False, "seq", min_confidence)

    def propose(self, state: DecodeState) -> TokenTree:
        """See `Method.propose`."""
        if state.target.attention.fuses(state.feature):
            return super().propose(state)
        assert self.ring is not None, "begin comes first"
        self._learn_words(state)
        x, q = self._enter(state)
        this = self._open(state)
        replaced = self.ring.get(this.entries[:, 1:])
        tokens, sure = [state.roots], torch.tensor([not row.finished for row in state.rows])
        for depth in range(self.num_nodes - 1):
            if depth:
                x = F.embedding(tokens[-1][:, None], state.target.embedding)
                q, k, v = self._draft.project(x, this.rope(depth))
                self.ring.put(this.entries[:, depth : depth + 1], k, v)
            logits = self._score(state, this, depth, x, q)
            best, index = logits.max(-1)
            tokens.append(self._words.token_ids[index])
            if self._min_confidence:
                sure &= (best - logits.logsumexp(-1)).exp() >= self._min_confidence
                if not sure.any():
                    break
        self.ring.put(this.entries[:, 1:], *replaced)
        return TokenTree.chain(torch.stack(tokens, 1))

    def _enter(self, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Bring what was emitted into the ring; returns the root, embedded, and its queries."""
        assert self.ring is not None
        positions, entries = self._claim(state.emitted, state.num_emitted, state.cache.lengths + 1)
        x = F.embedding(state.emitted, state.target.embedding)
        q, k, v = self._draft.project(x, state.target.rope(positions))
        self.ring.put(entries, k, v)
        rows, last = torch.arange(len(state.rows)), state.num_emitted - 1
        return x[rows, last][:, None], q[rows, last][:, None]

    def _open(self, state: DecodeState) -> _Round:
        assert self.ring is not None
        positions = state.cache.lengths[:, None] + torch.arange(self.num_nodes - 1)
        cos, sin = state.target.rope(positions)
        return _Round(
            positions,
            positions % self.ring.window,
            cos,
            sin,
            self._draft.features(state.feature[:, None], self.num_nodes - 1),
            state.target.attention.plan(state.cache.lengths, 1),
        )

    def _score(self, state: DecodeState, this: _Round, depth: int, x: Tensor, q: Tensor) -> Tensor:
        """One pass of the draft: scores [B, V'] of what may follow x [B, 1, E], with noise when sampling."""
        assert self.ring is not None
        attention = state.target.attention
        filled = (this.positions[:, depth] + 1).clamp(max=self.ring.window)
        out = attention.prefix(q, self.ring.keys, self.ring.values, attention.plan(filled, 1))[0]
        x, queries = self._draft.query(x, out, this.rope(depth), this.features[depth])
        outs = [
            attention.prefix(part, *state.cache.layer(layer), this.prefix)[0]
            for part, layer in zip(queries.split(self._draft.num_heads, 2), self._layers, strict=True)
        ]
        logits = self._words(self._draft.finish(x, outs))[:, 0]
        if not state.sampling.greedy:
            noise = gumbel(state.seeds, this.positions[:, depth] + 1, self._words.token_ids)
            logits = logits / state.sampling.temperature + noise.float()
        return logits
