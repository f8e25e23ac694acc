"""Target and draft by fused kernels: between two matrix products lies one launch, or none."""

from __future__ import annotations

import torch
from torch import Tensor

from longspec.attention import Attention, AttentionPlan
from longspec.kernels.norm import add_rms_norm, rms_norm
from longspec.kernels.rope import rope_write
from longspec.kernels.silu import silu_mul
from longspec.models.draft import GlideDraft
from longspec.models.layers import Block, CachedPass, FeedForward, SelfAttention
from longspec.models.target import Transformer


def run_blocks(target: Transformer, x: Tensor, run: CachedPass) -> Tensor:
    """What `Transformer.forward` returns for embedded tokens x [B, T, E]."""
    entries = run.slots[1]
    delta: Tensor | None = None  # what the residual stream still lacks: it is added by the next norm
    for block in target.blocks:
        assert isinstance(block, Block)
        normed, x = _norm(x, delta, block.attention_norm.weight, target.config.rms_eps)
        k, v = run.cache.layer(block.attention.layer)
        q = rope_write(
            block.attention.qkv(normed),
            target.rope.table,
            run.positions.expand_as(entries),
            entries,
            k,
            v,
            _head_norms(block.attention),
        )
        out = run.attention.attend(q, k, v, run.plan)[0]
        delta = block.attention.output(out.flatten(2))
        normed, x = _norm(x, delta, block.ffn_norm.weight, target.config.rms_eps)
        delta = _feed_forward(block.ffn, normed)
    return _norm(x, delta, target.norm.weight, target.config.rms_eps)[0]


def write_draft(
    draft: GlideDraft, x: Tensor, table: Tensor, positions: Tensor, place: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Put the draft's own keys and values of embedded tokens x [B, T, E] in place; returns the queries.

    `place` is the keys and values [B, K, S, D] and the entries [B, T] where those of x go.
    """
    normed = rms_norm(x, draft.self_norm.weight, draft.target_config.rms_eps)
    keys, values, entries = place
    return rope_write(draft.qkv(normed), table, positions, entries, keys, values)


def run_draft(
    draft: GlideDraft,
    x: Tensor,
    table: Tensor,
    positions: Tensor,
    place: tuple[Tensor, Tensor, Tensor],
    sees: Tensor,
    attention: Attention,
    cross: list[tuple[Tensor, Tensor]],
    plan: AttentionPlan,
    feature: Tensor | None,
) -> Tensor:
    """What `GlideDraft.forward` returns for embedded tokens x [B, T, E], while decoding.

    Of the entries at `place` (see `write_draft`) the queries see what `sees` [B, T, S] allows. cross holds
    the target's KV of each cross layer.
    """
    eps = draft.target_config.rms_eps
    keys, values, entries = place
    q = write_draft(draft, x, table, positions, place)
    delta = draft.self_output(attention.masked(q, keys, values, sees)[0].flatten(2))
    if draft.feature is not None:
        assert feature is not None, "this draft needs the target's hidden state"
        delta = delta + draft.feature(feature)
    normed, x = add_rms_norm(x, delta, draft.cross_norm.weight, eps)
    # Queries alone: no head of the cache takes part.
    queries = rope_write(draft.cross_q(normed), table, positions, entries, keys[:, :0], values[:, :0])
    outs = [
        attention.prefix(part, *layer, plan)[0]
        for part, layer in zip(queries.split(draft.num_heads, 2), cross, strict=True)
    ]
    delta = draft.cross_output(torch.cat(outs, 2).flatten(2))
    normed, x = add_rms_norm(x, delta, draft.ffn_norm.weight, eps)
    delta = _feed_forward(draft.ffn, normed)
    return x + delta if draft.final_norm is None else add_rms_norm(x, delta, draft.final_norm.weight, eps)[0]


def _norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed stream and the stream itself."""
    return (rms_norm(x, weight, eps), x) if delta is None else add_rms_norm(x, delta, weight, eps)


def _head_norms(attention: SelfAttention) -> tuple[Tensor, Tensor, float] | None:
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps


def _feed_forward(ffn: FeedForward, x: Tensor) -> Tensor:
    return ffn.down(silu_mul(ffn.gate_up(x)))
