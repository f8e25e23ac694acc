"""What the draft learns: to predict the next token from what it will see of the target when it drafts.

The frozen target reads the batch once, without gradients. The draft gets the target's keys and values of the
cross layers and its final hidden states, shifted by the lag of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.attention.packed import Pieces, attend_packed
from longspec.models.draft import GlideDraft
from longspec.models.layers import PLAIN, BlockByBlock, Ops, Rope, SelfAttention
from longspec.models.rope import rotate
from longspec.models.target import Transformer
from longspec.train.layout import Layout
from longspec.train.losses import CROSS_ENTROPY, Chunk, LossShares, head_loss, one_chunk, score

Gather = Callable[[list[Tensor]], AbstractContextManager[None]]
"""A context in which weights that are sharded over processes are complete."""
Read = tuple[Tensor, list[tuple[Tensor, Tensor]]]
"""The target's hidden states [B, T, E] and the keys and values [B, T, K, D] of the cross layers."""
# For the progress line, this many queries of a batch are compared with the target.
_PROBES = 256


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
class LaggedPass:
    """The draft's attention in training: its own window, and the target's KV as far as the lag allows."""

    draft: GlideDraft
    layout: Layout
    rope: Rope
    kv: list[tuple[Tensor, Tensor]]
    """Keys and values [B, T, K, D] of each cross layer."""
    ops: Ops = PLAIN

    def attend_self(self, qkv: Tensor) -> Tensor:
        q, k, v = self.draft.heads(qkv, self.rope)
        return attend_packed(q, k, v, self.layout.own, self.draft.config.window).flatten(2)

    def attend_cross(self, queries: Tensor) -> Tensor:
        """Zero for a query that sees no target token."""
        heads = rotate(queries.unflatten(-1, (-1, self.draft.head_dim)), *self.rope)
        outs = [
            attend_packed(q, self.layout.shift(k), self.layout.shift(v), self.layout.lagged)
            for q, (k, v) in zip(heads.chunk(len(self.kv), 2), self.kv, strict=True)
        ]
        return (torch.cat(outs, 2) * self.layout.sees[:, :, None, None]).flatten(2)


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

    def read(self, layout: Layout) -> Read:
        """The target's hidden states [B, T, E] and the keys and values of the cross layers."""
        layers = self.draft.config.layers_of(self.target.config)
        self.target.rope.reserve(layout.max_position + 1)
        run = TargetPass(self._rope(layout), layout.documents, layers, self.whole)
        with torch.no_grad():
            hidden = (self.run_target or self.target)(layout.tokens, run)
        return hidden, [run.kept[layer] for layer in layers]

    def draft_hidden(
        self, layouts: Sequence[Layout], hidden: Tensor, kv: list[tuple[Tensor, Tensor]]
    ) -> list[Tensor]:
        """The draft's hidden states [B, T, E] at every query, for layouts of one batch that differ in their
        lags. For a draft that reads its parents, they are those of lags 1, 2, ..."""
        rope, uses_feature = self._rope(layouts[0]), self.draft.config.use_feature
        levels = [
            (
                layout.shift(hidden) * layout.sees[:, :, None] if uses_feature else None,
                layout.lags,
                LaggedPass(self.draft, layout, rope, kv),
            )
            for layout in layouts
        ]
        x = F.embedding(layouts[0].tokens, self.target.embedding)
        return (self.run_draft or self.draft)(x, levels)

    def __call__(self, layouts: Sequence[Layout], read: Read | None = None) -> Outcome:
        """The loss of one batch, with layouts as in `draft_hidden`. `read` saves the target's pass, if other
        lags have done it already."""
        hidden, kv = read or self.read(layouts[0])
        total, probes = hidden.new_zeros((), dtype=torch.float32), []
        with self.gather([self.target.embedding, self.target.head.weight]):
            drafted, head = self.draft_hidden(layouts, hidden, kv), self.head()
            for layout, weight, states in zip(layouts, self.weights(len(layouts)), drafted, strict=True):
                asked, teacher = (one.flatten(0, 1)[layout.queries] for one in (states, hidden))
                loss = head_loss(asked, head, layout.labels, teacher, self.shares, self.chunk)
                total = total + weight * loss
                probes.append(self._probe(layout, asked, teacher, head))
        return Outcome(total, torch.cat(probes))

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
    def _probe(self, layout: Layout, drafted: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
        count = len(layout.labels)
        some = torch.linspace(0, max(count - 1, 0), min(count, _PROBES), device=drafted.device).long()
        ids, labels = self.draft.vocab_ids, layout.labels[some]
        best = score(drafted[some], head).argmax(-1)
        scores = score(teacher[some], self.target.head.weight)
        if ids is not None:
            best, labels = ids[best], ids[labels]
        right = best == scores.argmax(-1)
        own_loss = F.cross_entropy(scores, labels, reduction="none")
        rows = layout.queries[some] // layout.tokens.shape[1]
        return torch.stack((right.float(), own_loss, layout.lags[rows].float()), 1)
