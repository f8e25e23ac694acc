"""Which of a target's layers a draft should read: those with induction heads.

An induction head continues "A B ... A" with B: its query at the second A finds the key of B, and that key
tells that A came before it. A draft has one layer, which cannot make such keys itself. So it can copy from
the text only if its cross-attention reads layers of the target that have them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspec.models.layers import PLAIN, BlockByBlock, Ops, Rope, SelfAttention
from longspec.models.target import Transformer

NUM_CROSS_LAYERS = 5
"""How many layers of its target a draft of ours reads."""
# Texts to measure with, and how many random tokens are repeated in each.
_TEXTS, _REPEATED = 4, 64


@dataclass
class _InductionPass(BlockByBlock):
    """Attends by the definition of attention, because the scores need its weights."""

    rope: Rope
    num_repeated: int
    """How many positions the second occurrence of a token is after the first one."""
    ops: Ops = PLAIN
    scores: list[float] = field(default_factory=list)
    """Of the layers so far."""

    def attend(self, module: SelfAttention, qkv: Tensor) -> Tensor:
        q, k, v = module.heads(qkv, self.rope)
        grouped = q.float().unflatten(2, (module.num_kv_heads, -1))
        scores = torch.einsum("btkgd,bskd->bkgts", grouped, k.float()) * module.head_dim**-0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        # On this diagonal a query sees the token after the first occurrence of its own. The first entry is of
        # the last token that has no earlier occurrence.
        induction = weights.diagonal(1 - self.num_repeated, -2, -1)[..., 1:]
        self.scores.append(induction.mean((0, 3)).max().item())
        return torch.einsum("bkgts,bskd->btkgd", weights, v.float()).flatten(2).to(qkv.dtype)


@torch.no_grad()
def induction_scores(target: Transformer, seed: int = 0) -> list[float]:
    """How well each layer of a whole target, with plain weights, finds what followed earlier.

    The texts are random tokens, repeated once. A head's score is its mean attention weight from the second
    occurrence of a token to the token after the first one; a layer's score is that of its best head.
    """
    config, generator = target.config, torch.Generator().manual_seed(seed)
    count = min(_REPEATED, config.vocab_size, config.max_length // 2)
    # Without duplicates, so that a token has one first occurrence.
    rows = [torch.randperm(config.vocab_size, generator=generator)[:count] for _ in range(_TEXTS)]
    tokens = torch.stack(rows).repeat(1, 2).to(target.device)
    target.rope.reserve(2 * count)
    rope = target.rope(torch.arange(2 * count, device=target.device).expand_as(tokens))
    run = _InductionPass(rope, count)
    target(tokens, run)
    return run.scores


def copying_layers(scores: Sequence[float], count: int = NUM_CROSS_LAYERS) -> tuple[int, ...]:
    """The evenly spaced layers with the largest sum of scores; later ones if several are alike, and all if
    there are no more than `count`.

    They are evenly spaced because one launch attends to all of such layers.
    """
    num_layers = len(scores)
    if num_layers <= count:
        return tuple(range(num_layers))
    runs = [
        tuple(range(first, first + count * step, step))
        for step in range(1, num_layers)
        for first in range(num_layers - (count - 1) * step)
    ]
    return max(runs, key=lambda layers: (math.fsum(scores[layer] for layer in layers), layers))
