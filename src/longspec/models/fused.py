"""Target and draft by fused kernels: between two matrix products lies one launch, or none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.attention import AttentionPlan
from longspec.cache import KVCache
from longspec.kernels.embed import embed
from longspec.kernels.linear import covers, few_rows
from longspec.kernels.norm import add_rms_norm, rms_norm
from longspec.kernels.rope import rope_write
from longspec.kernels.silu import silu_mul
from longspec.models.draft import GlideDraft
from longspec.models.layers import Block, FeedForward, Linear, RMSNorm, SelfAttention
from longspec.models.target import Transformer

Stream = tuple[Tensor, Tensor | None]
"""The residual stream, and what it still lacks where a library made that: the next norm adds it."""


def run_blocks(
    target: Transformer,
    tokens: Tensor,
    cache: KVCache,
    positions: Tensor,
    entries: Tensor,
    plan: AttentionPlan,
) -> Tensor:
    """What `Transformer.forward` returns for tokens [B, T].

    Positions and entries, int64 [B, T], say where each stands in the text and in the cache.
    """
    (x, _), table = embed(tokens, target.embedding), target.rope.table
    delta: Tensor | None = None
    for block in target.blocks:
        assert isinstance(block, Block)
        qkv, x = _normed_linear(block.attention.qkv, block.attention_norm, x, delta)
        k, v = cache.layer(block.attention.layer)
        q = rope_write(qkv, table, positions, entries, k, v, _head_norms(block.attention))
        out = target.attention.attend(q, k, v, plan)[0]
        x, delta = _add_linear(block.attention.output, out.flatten(2), x)
        x, delta = _feed_forward(block.ffn, block.ffn_norm, x, delta)
    return _norm(target.norm, x, delta)[0]


@dataclass(frozen=True)
class DraftPass:
    """What all levels of a draft's tree share."""

    draft: GlideDraft
    target: Transformer
    cross: list[tuple[Tensor, Tensor]]
    """The target's KV of the cross layers, see `cross_caches`."""
    plan: AttentionPlan
    feature: Tensor | None
    """What the target's hidden state adds to each row's residual stream, [B, 1, E]."""


Place = tuple[Tensor, Tensor, Tensor]
"""The draft's own keys and values [B, K, S, D], and the entries [B, T] where those of new tokens go."""


def write_draft(
    draft: GlideDraft, tokens: Tensor, target: Transformer, positions: Tensor, place: Place
) -> None:
    """Put the draft's own keys and values of tokens [B, T] in place."""
    x, _ = embed(tokens, target.embedding)
    _write_draft(draft, x, target.rope.table, positions, place)


def run_draft(run: DraftPass, tokens: Tensor, positions: Tensor, place: Place, sees: Tensor) -> Tensor:
    """What `GlideDraft.forward` returns for tokens [B, T], while decoding.

    Of the entries at `place` the queries see what `sees` [B, T, S] allows.
    """
    draft, table, attention = run.draft, run.target.rope.table, run.target.attention
    keys, values, entries = place
    x, stream = embed(tokens, run.target.embedding, run.feature)
    q = _write_draft(draft, x, table, positions, place)
    out = attention.masked(q, keys, values, sees)[0]
    x, delta = _add_linear(draft.self_output, out.flatten(2), stream)
    queries, x = _normed_linear(draft.cross_q, draft.cross_norm, x, delta)
    # Queries alone: no head of the cache takes part.
    queries = rope_write(queries, table, positions, entries, keys[:, :0], values[:, :0])
    outs = [
        attention.prefix(part, *caches, run.plan)[0]
        for part, caches in zip(queries.chunk(len(run.cross), 2), run.cross, strict=True)
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
    x, delta = _add_linear(draft.cross_output, out.flatten(2), x)
    x, delta = _feed_forward(draft.ffn, draft.ffn_norm, x, delta)
    if draft.final_norm is not None:
        return _norm(draft.final_norm, x, delta)[0]
    return x if delta is None else x + delta


def cross_caches(cache: KVCache, layers: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """The keys and values of these layers: as one pair [C, B, K, S, D] where the layers stand evenly, so that
    one call attends to all of them; otherwise a pair of each."""
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    if step > 0 and layers == tuple(range(layers[0], layers[-1] + 1, step)):
        every = slice(layers[0], layers[-1] + 1, step)
        return [(cache.keys[every], cache.values[every])]
    return [cache.layer(layer) for layer in layers]


def _write_draft(draft: GlideDraft, x: Tensor, table: Tensor, positions: Tensor, place: Place) -> Tensor:
    """As `write_draft`, for embedded tokens; returns the queries."""
    keys, values, entries = place
    qkv, _ = _normed_linear(draft.qkv, draft.self_norm, x, None)
    return rope_write(qkv, table, positions, entries, keys, values)


def _norm(norm: RMSNorm, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """The normed stream and the stream itself."""
    if delta is None:
        return rms_norm(x, norm.weight, norm.eps), x
    return add_rms_norm(x, delta, norm.weight, norm.eps)


def _normed_linear(linear: Linear, norm: RMSNorm, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """The projection of the normed stream, and the stream itself."""
    if covers(x, linear.weight):
        return few_rows(x, linear.weight, linear.bias, delta, (norm.weight, norm.eps))
    normed, x = _norm(norm, x, delta)
    return linear(normed), x


def _add_linear(linear: Linear, x: Tensor, stream: Tensor) -> Stream:
    """The stream with the projection of x added to it."""
    if covers(x, linear.weight):
        return few_rows(x, linear.weight, linear.bias, residual=stream)[0], None
    return stream, linear(x)


def _feed_forward(ffn: FeedForward, norm: RMSNorm, x: Tensor, delta: Tensor | None) -> Stream:
    """The stream behind the feed-forward."""
    if covers(x, ffn.gate_up.weight):
        weight, bias = ffn.gate_up.weight, ffn.gate_up.bias
        inner, x = few_rows(x, weight, bias, delta, (norm.weight, norm.eps), gated=True)
    else:
        normed, x = _norm(norm, x, delta)
        inner = silu_mul(ffn.gate_up(normed))
    return _add_linear(ffn.down, inner, x)


def _head_norms(attention: SelfAttention) -> tuple[Tensor, Tensor, float] | None:
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps
