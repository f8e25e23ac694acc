"""Which of a target's layers a draft should read: those that copy.

A head that continues "A B ... A" with B does two things. Its query at the second A finds the key of B,
because that key tells that A came before it. And from the value that it finds there, B can be read. A draft
has one layer, which can make neither such keys nor such values. So it can copy from the text only if its
cross-attention reads layers of the target that have both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspec.models.layers import PLAIN, BlockByBlock, Ops, Rope, SelfAttention, look_up
from longspec.models.target import Transformer

NUM_CROSS_LAYERS = 5
"""How many layers of its target a draft of ours reads."""
# Texts to measure with, and how many random tokens are repeated in each.
_TEXTS, _REPEATED = 32, 64
# A ridge regression is fitted to three of four texts, and tested on the fourth.
_TEST_EVERY, _RIDGE = 4, 0.01


@dataclass
class _CopyingPass(BlockByBlock):
    """Attends by the definition of attention, because the scores need its weights."""

    rope: Rope
    tokens: Tensor
    """[B, T], the second half of each text like the first."""
    embedded: Tensor
    """The embedded tokens of the first half, fp32 [B, T / 2, E], each of length 1."""
    ops: Ops = PLAIN
    scores: list[float] = field(default_factory=list)
    """Of the layers so far."""

    def attend(self, module: SelfAttention, qkv: Tensor) -> Tensor:
        q, k, v = module.heads(qkv, self.rope)
        grouped = q.float().unflatten(2, (module.num_kv_heads, -1))
        scores = torch.einsum("btkgd,bskd->bkgts", grouped, k.float()) * module.head_dim**-0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        count = self.tokens.shape[1] // 2
        # The weight from each token to the one after the token's first occurrence. The first entry is left
        # out, because its token occurs for the first time.
        found = weights.diagonal(1 - count, -2, -1)[..., 1:].mean((0, 3)).amax(1)
        read = read_share(v[:, 1:count].float(), self.tokens[:, 1:count], self.embedded[:, 1:])
        self.scores.append((found * read).max().item())
        return torch.einsum("bkgts,bskd->btkgd", weights, v.float()).flatten(2).to(qkv.dtype)


def read_share(values: Tensor, tokens: Tensor, embedded: Tensor) -> Tensor:
    """How many of the `tokens` [B, T] can be read from their `values` [B, T, K, D], as a share for each of
    the K heads.

    A linear map from a head's values to the tokens' `embedded` [B, T, E] is fitted to most of the texts. In
    the others, a token counts if the map leads nearest to its own embedding, among those of all their tokens.
    """
    is_test = torch.arange(len(tokens), device=tokens.device) % _TEST_EVERY == 0
    (x, y), (test_x, test_y) = (
        (values[part].flatten(0, 1).movedim(1, 0), embedded[part].flatten(0, 1))  # [K, N, D], [N, E]
        for part in (~is_test, is_test)
    )
    mean, deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True).clamp(min=1e-6)
    x, test_x, center = (x - mean) / deviation, (test_x - mean) / deviation, y.mean(0)
    ridge = _RIDGE * x.shape[1] * torch.eye(x.shape[2], device=x.device)
    fitted = torch.linalg.solve(x.mT @ x + ridge, x.mT @ (y - center))
    nearest = (test_x @ fitted @ (test_y - center).T).argmax(2)
    asked = tokens[is_test].flatten()
    return (asked[nearest] == asked).float().mean(1)


@torch.no_grad()
def copying_scores(target: Transformer, seed: int = 0) -> list[float]:
    """A score for each layer: how well it copies from earlier text. The target must be whole, not a rank's
    part of it, and its weights must be plain.

    The texts are random tokens, repeated once. A KV head has two figures: the mean attention weight, in the
    best of its query heads, from the second occurrence of a token to the token after the first one; and
    `read_share`. Its score is their product, and a layer's score is that of its best head.
    """
    config, generator = target.config, torch.Generator().manual_seed(seed)
    count = min(_REPEATED, config.vocab_size, config.max_length // 2)
    # Without duplicates, so that a token has one first occurrence.
    rows = [torch.randperm(config.vocab_size, generator=generator)[:count] for _ in range(_TEXTS)]
    tokens = torch.stack(rows).repeat(1, 2).to(target.device)
    target.rope.reserve(2 * count)
    rope = target.rope(torch.arange(2 * count, device=target.device).expand_as(tokens))
    embedded = look_up(target.table, tokens[:, :count]).float()
    run = _CopyingPass(rope, tokens, embedded / embedded.norm(dim=-1, keepdim=True).clamp(min=1e-6))
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
