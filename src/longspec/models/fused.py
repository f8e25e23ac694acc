"""Target and draft by fused kernels: between two matrix products lies one launch, or none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.attention import AttentionPlan
from longspec.cache import DraftCache, KVCache
from longspec.kernels.embed import embed, embed_level
from longspec.kernels.linear import covers, few_rows, folds
from longspec.kernels.masked import Nodes, masked
from longspec.kernels.norm import Norm, Stream, norm_stream
from longspec.kernels.rope import rope_write
from longspec.kernels.silu import silu_mul
from longspec.models.draft import GlideDraft
from longspec.models.layers import Block, FeedForward, Linear, RMSNorm, SelfAttention
from longspec.models.target import Transformer

Reader = tuple[RMSNorm, Linear]
"""A norm of the residual stream, and the projection of what it gives."""


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
    blocks = [block for block in target.blocks if isinstance(block, Block)]
    readers = [(block.attention_norm, block.attention.qkv) for block in blocks]
    stream, _ = embed(tokens, target.embedding, factor=_factor(readers[0], tokens.numel()))
    for block, reader, following in zip(blocks, readers, (*readers[1:], None), strict=True):
        qkv, stream = _normed_linear(reader, stream)
        k, v = cache.layer(block.attention.layer)
        q = rope_write(qkv, target.rope.table, positions, entries, k, v, _head_norms(block.attention))
        out = target.attention.attend(q, k, v, plan)[0].flatten(2)
        stream = _add_linear(block.attention.output, out, stream, (block.ffn_norm, block.ffn.gate_up))
        stream = _feed_forward(block.ffn, block.ffn_norm, stream, following)
    return norm_stream(stream, _settings(target.norm))[0]


@dataclass(frozen=True)
class DraftPass:
    """What all levels of a draft's tree share."""

    draft: GlideDraft
    target: Transformer
    ring: DraftCache
    cross: list[tuple[Tensor, Tensor]]
    """The target's KV of the cross layers, see `cross_caches`."""
    plan: AttentionPlan
    parents: Tensor
    """Of the tree's nodes, int64 [B, N]; those of the levels that are there."""


def run_root(
    run: DraftPass, newest: Tensor, feature: Tensor | None, positions: Tensor, entries: Tensor
) -> Tensor:
    """What `GlideDraft.forward` returns for the first of the newest tokens [B, W], all of which go into the
    ring: `claim_newest` says where.

    `feature` [B, 1, E] is what the target's hidden state adds to each row's residual stream.
    """
    reader = (run.draft.self_norm, run.draft.qkv)
    # Copied here, for whoever reads them wants them older than the last kernel.
    roots = positions[:, :1].contiguous()
    x, stream = embed(newest, run.target.embedding, feature, _factor(reader, newest.numel()))
    q = _write_draft(run, x, positions, entries)
    return _finish_draft(run, q[:, :1], Stream(stream.x[:, :1]), roots, 0, 0)


def run_level(run: DraftPass, tokens: Tensor, feature: Tensor | None, first: int, depth: int) -> Tensor:
    """What `GlideDraft.forward` returns for a level [B, n] of the tree's nodes, from `first` on, all `depth`
    deep. `feature` is as for `run_root`."""
    factor = _factor((run.draft.self_norm, run.draft.qkv), tokens.numel())
    place = (run.plan.lengths, depth, run.ring.window + first)
    x, stream, positions, entries = embed_level(tokens, run.target.embedding, feature, factor, place)
    q = _write_draft(run, x, positions, entries)
    return _finish_draft(run, q, stream, positions, first, depth)


def cross_caches(cache: KVCache, layers: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """The keys and values of these layers: as one pair [C, B, K, S, D] where the layers stand evenly, so that
    one call attends to all of them; otherwise a pair of each."""
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    if step > 0 and layers == tuple(range(layers[0], layers[-1] + 1, step)):
        every = slice(layers[0], layers[-1] + 1, step)
        return [(cache.keys[every], cache.values[every])]
    return [cache.layer(layer) for layer in layers]


def _write_draft(run: DraftPass, x: Stream, positions: Tensor, entries: Tensor) -> Tensor:
    """Put the draft's own keys and values of embedded tokens in place; returns their queries."""
    qkv, _ = _normed_linear((run.draft.self_norm, run.draft.qkv), x)
    return rope_write(qkv, run.target.rope.table, positions, entries, run.ring.keys, run.ring.values)


def _finish_draft(
    run: DraftPass, q: Tensor, stream: Stream, positions: Tensor, first: int, depth: int
) -> Tensor:
    """From the queries of self-attention to the draft's hidden states."""
    draft, ring, attention = run.draft, run.ring, run.target.attention
    nodes = Nodes(ring.positions, ring.window, run.plan.lengths, run.parents, first, depth)
    out = masked(q, ring.keys, ring.values, nodes)[0]
    cross = (draft.cross_norm, draft.cross_q)
    stream = _add_linear(draft.self_output, out.flatten(2), stream, cross)
    queries, stream = _normed_linear(cross, stream)
    # Queries alone: no head of the cache takes part.
    table, none = run.target.rope.table, ring.keys[:, :0]
    queries = rope_write(queries, table, positions, positions, none, none)
    outs = [
        attention.prefix(part, *caches, run.plan)[0]
        for part, caches in zip(queries.chunk(len(run.cross), 2), run.cross, strict=True)
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
    stream = _add_linear(draft.cross_output, out.flatten(2), stream, (draft.ffn_norm, draft.ffn.gate_up))
    stream = _feed_forward(draft.ffn, draft.ffn_norm, stream, None)
    if draft.final_norm is not None:
        return norm_stream(stream, _settings(draft.final_norm))[0]
    return stream.x if stream.delta is None else stream.x + stream.delta


def _settings(norm: RMSNorm) -> Norm:
    return norm.weight, norm.eps


def _factor(reader: Reader | None, num_rows: int) -> Tensor | None:
    """The norm's weight, where those who make so many rows of the stream are to do what the norm needs."""
    return reader[0].weight if reader is not None and folds(num_rows, reader[1].weight) else None


def _normed_linear(reader: Reader, stream: Stream) -> tuple[Tensor, Stream]:
    """The projection of the normed stream, and the stream with nothing lacking."""
    norm, linear = reader
    if covers(stream.x, linear.weight):
        out, stream = few_rows(stream, linear.weight, linear.bias, _settings(norm))
        return out.x, stream
    normed, stream = norm_stream(stream, _settings(norm))
    return linear(normed), stream


def _add_linear(linear: Linear, x: Tensor, stream: Stream, following: Reader | None) -> Stream:
    """The stream with the projection of x added to it, for `following` to read."""
    if not covers(x, linear.weight):
        return Stream(stream.x, linear(x))
    factor = _factor(following, x.numel() // x.shape[-1])
    return few_rows(Stream(x), linear.weight, linear.bias, residual=stream.x, factor=factor)[0]


def _feed_forward(ffn: FeedForward, norm: RMSNorm, stream: Stream, following: Reader | None) -> Stream:
    """The stream behind the feed-forward, for `following` to read."""
    if covers(stream.x, ffn.gate_up.weight):
        out, stream = few_rows(stream, ffn.gate_up.weight, ffn.gate_up.bias, _settings(norm), gated=True)
        inner = out.x
    else:
        normed, stream = norm_stream(stream, _settings(norm))
        inner = silu_mul(ffn.gate_up(normed))
    return _add_linear(ffn.down, inner, stream, following)


def _head_norms(attention: SelfAttention) -> tuple[Tensor, Tensor, float] | None:
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps
