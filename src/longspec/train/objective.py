"""What the draft learns: to predict the next token from what it will see of the target when it drafts.

The frozen target reads the batch once, without gradients. The draft gets the target's keys and values of the
cross layers and its final hidden states, as far as the lag of each row allows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.attention.packed import Pieces, attend_ends, attend_packed
from longspec.models.draft import GlideDraft
from longspec.models.layers import PLAIN, BlockByBlock, Ops, Rope, SelfAttention
from longspec.models.target import Transformer
from longspec.train.layout import Layout, Level
from longspec.train.losses import CROSS_ENTROPY, Chunk, LossShares, head_loss, one_chunk, score

Gather = Callable[[list[Tensor]], AbstractContextManager[None]]
"""A context in which weights that are sharded over processes are complete."""


class Reading(NamedTuple):
    """What the target has found in a batch."""

    hidden: Tensor
    """Its final hidden states [B, T, E]."""
    keys: Tensor
    """Of all cross layers, [B, T, C K, D]."""
    values: Tensor


@dataclass
class TargetPass(BlockByBlock):
    """A training pass of the target: each document attends to itself; KV of the layers in `keep` is kept."""

    rope: Rope
    documents: Pieces
    keep: tuple[int, ...]
    whole: Callable[[Tensor], Tensor] = lambda heads: heads
    """Joins the KV heads of all processes, if each has only some."""
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    ops: Ops = PLAIN

    def attend(self, module: SelfAttention, qkv: Tensor) -> Tensor:
        q, k, v = module.heads(qkv, self.rope)
        if module.layer in self.keep:
            self.kept[module.layer] = self.whole(k), self.whole(v)
        return attend_packed(q, k, v, self.documents).flatten(2)


@dataclass(frozen=True)
class OwnPass:
    """The draft's attention to itself in training: to a window of all tokens. The lag does not matter."""

    draft: GlideDraft
    pieces: Pieces
    rope: Rope
    ops: Ops = PLAIN

    def attend_self(self, qkv: Tensor) -> Tensor:
        q, k, v = self.draft.heads(qkv, self.rope)
        return attend_packed(q, k, v, self.pieces, self.draft.config.window).flatten(2)


@dataclass(frozen=True)
class LaggedPass:
    """The draft's attention to the target in training, at the R asked tokens, as far as the lag allows."""

    draft: GlideDraft
    level: Level
    rope: Rope
    """Of the asked tokens, [R, 1, 1, D]."""
    keys: Tensor
    """Of all cross layers, [B T, C K, D]."""
    values: Tensor
    ops: Ops = PLAIN

    def attend_cross(self, queries: Tensor) -> Tensor:
        """Zero for a query that sees no target token; queries and result are [R, 1, C H D]."""
        level = self.level
        heads = self.draft.cross_heads(queries, self.rope)[:, 0]
        keys, values = self.keys[level.keys], self.values[level.keys]
        # Query heads and KV heads are both in the order of the cross layers, so one call attends to all.
        out = attend_ends(heads, keys, values, level.query_pieces, level.key_pieces)
        return (out * level.sees[:, None, None]).flatten(1)[:, None]


@dataclass(frozen=True)
class Outcome:
    """The results of one batch."""

    loss: Tensor
    """Summed over the queries that count; it has the gradient."""
    probes: Tensor
    """[R, 3] fp32, for some queries: whether the draft's best token is the target's, the target's own
    cross-entropy, and the lag."""


@dataclass(frozen=True)
class Objective:
    """The loss of a draft on laid-out batches."""

    target: Transformer
    draft: GlideDraft
    """The weights; `run_draft` runs it."""
    shares: LossShares = CROSS_ENTROPY
    lag_decay: float = 1.0
    """The weight of a lag's loss, relative to the lag below it, where lags are learnt together."""
    run_target: Callable[..., Tensor] | None = None
    """The target, if something wraps it."""
    run_draft: Callable[..., list[Tensor]] | None = None
    gather: Gather = lambda weights: nullcontext()
    whole: Callable[[Tensor], Tensor] = lambda heads: heads
    chunk: Chunk = one_chunk

    def read(self, layout: Layout) -> Reading:
        """Let the target read the batch. This does not depend on the lags."""
        layers = self.draft.config.layers_of(self.target.config)
        self.target.rope.reserve(layout.max_position + 1)
        run = TargetPass(self._rope(layout), layout.documents, layers, self.whole)
        with torch.no_grad():
            hidden = (self.run_target or self.target)(layout.tokens, run)
        keys, values = (torch.cat(parts, 2) for parts in zip(*(run.kept[n] for n in layers), strict=True))
        return Reading(hidden, keys, values)

    def draft_hidden(self, layout: Layout, read: Reading) -> list[Tensor]:
        """The draft's hidden states [R, E] at the asked tokens, for each level of the layout."""
        rope, uses_feature = self._rope(layout), self.draft.config.use_feature
        asked_rope = rope[0].flatten(0, 1)[layout.asked, None], rope[1].flatten(0, 1)[layout.asked, None]
        hidden, keys, values = (one.flatten(0, 1) for one in read)
        levels = [
            (
                (hidden[level.source] * level.sees[:, None])[:, None] if uses_feature else None,
                level.lags,
                LaggedPass(self.draft, level, asked_rope, keys, values),
            )
            for level in layout.levels
        ]
        x = F.embedding(layout.tokens, self.target.embedding)
        own = OwnPass(self.draft, layout.own, rope)
        return [states[:, 0] for states in (self.run_draft or self.draft)(x, own, layout.asked, levels)]

    def __call__(self, layout: Layout, read: Reading | None = None) -> Outcome:
        """The loss of one batch. `read` saves the target's pass, if other lags have done it already."""
        read = read or self.read(layout)
        with self.gather([self.target.embedding, self.target.head.weight]):
            states, head = [one[layout.queries] for one in self.draft_hidden(layout, read)], self.head()
            teacher = read.hidden.flatten(0, 1)[layout.asked[layout.queries]]
            weights = torch.stack(
                [
                    level.counts * weight
                    for level, weight in zip(layout.levels, self.weights(len(states)), strict=True)
                ]
            )
            loss = head_loss(states, head, layout.labels, weights, teacher, self.shares, self.chunk)
            return Outcome(loss, self._probe(layout, states, teacher, head))

    def weights(self, num_lags: int) -> list[float]:
        """How much the loss counts at each of the lags that are learnt together."""
        return [self.lag_decay**place for place in range(num_lags)]

    def _rope(self, layout: Layout) -> Rope:
        # Do not call the module: ZeRO-3 would take the call for a step of the target's pass out of order, and
        # drop the gathered weights.
        return self.target.rope.forward(layout.positions)

    def head(self) -> Tensor:
        ids, weight = self.draft.vocab_ids, self.target.head.weight
        return weight if ids is None else weight[ids]

    @torch.no_grad()
    def _probe(self, layout: Layout, states: list[Tensor], teacher: Tensor, head: Tensor) -> Tensor:
        some, ids = layout.probes, self.draft.vocab_ids
        labels = layout.labels[some]
        scores = score(teacher[some], self.target.head.weight)
        best = score(torch.cat([one[some] for one in states]), head).argmax(-1)
        if ids is not None:
            best, labels = ids[best], ids[labels]
        right = best.view(len(states), -1) == scores.argmax(-1)
        own_loss = F.cross_entropy(scores, labels, reduction="none").expand_as(right)
        rows = layout.queries[some]
        lags = [level.lags.expand(len(layout.asked))[rows] for level in layout.levels]
        return torch.stack((right.float(), own_loss, torch.stack(lags).float()), -1).flatten(0, 1)
