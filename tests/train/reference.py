"""The objective again, plain and slow: one token after the other's rules, explicit masks, nothing fused."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.data.collate import Batch
from longspec.models.draft import GlideDraft
from longspec.models.rope import inverse_frequencies
from longspec.models.target import Transformer
from longspec.train.losses import LossShares


def reference_loss(
    target: Transformer,
    draft: GlideDraft,
    batch: Batch,
    lags: list[int],
    offsets: list[int],
    num_sinks: int,
    shares: LossShares,
) -> tuple[Tensor, int]:
    """The summed loss and the number of queries that count."""
    total, count = torch.zeros(()), 0
    for row, (lag, offset) in enumerate(zip(lags, offsets, strict=True)):
        starts, learn = batch.starts[row].tolist(), batch.learn[row].tolist()
        for start in sorted(set(starts)):
            places = [i for i, s in enumerate(starts) if s == start]
            tokens = batch.tokens[row, places]
            positions = [n + offset if n >= num_sinks else n for n in range(len(places))]
            logits, own = document_logits(target, draft, tokens, positions, lag)
            ids = list(range(target.config.vocab_size))
            if draft.vocab_ids is not None:
                ids = draft.vocab_ids.tolist()
                own = own[:, ids]
            for n in range(lag, len(places) - 1):
                label = int(tokens[n + 1])
                if learn[places[n + 1]] and label in ids:
                    hard = F.cross_entropy(logits[n], torch.tensor(ids.index(label)))
                    p = own[n].softmax(-1)
                    divergence = (p * (p.log() - logits[n].log_softmax(-1))).sum()
                    overlap = -torch.minimum(p, logits[n].softmax(-1)).sum().log()
                    total = total + shares.soft * divergence + shares.overlap * overlap
                    total = total + (1 - sum(shares)) * hard
                    count += 1
    return total, count


def document_logits(
    target: Transformer, draft: GlideDraft, tokens: Tensor, positions: list[int], lag: int
) -> tuple[Tensor, Tensor]:
    """Scores of the draft [n, V'] and of the target [n, V] at every token of one document."""
    drafted, hidden = document_states(target, draft, tokens, positions, lag)
    head = target.head.weight if draft.vocab_ids is None else target.head.weight[draft.vocab_ids]
    return drafted @ head.T, hidden @ target.head.weight.T


def document_states(
    target: Transformer, draft: GlideDraft, tokens: Tensor, positions: list[int], lag: int
) -> tuple[Tensor, Tensor]:
    """The hidden states of the draft and of the target, [n, E]."""
    config, n = target.config, len(tokens)
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    where = torch.tensor(positions)
    place = torch.arange(n)
    causal = place[:, None] >= place
    x = target.embedding[tokens]
    kept = {}
    for index, block in enumerate(target.blocks):
        weights = dict(block.named_parameters())
        mixed = norm(x, weights["attention_norm.weight"], config.rms_eps) @ weights["attention.qkv.weight"].T
        mixed = mixed + weights["attention.qkv.bias"]
        q, k, v = mixed.view(n, -1, size).split((heads, kv_heads, kv_heads), 1)
        q, k = turn(target, q, where), turn(target, k, where)
        kept[index] = k, v
        x = x + attend(q, k, v, causal).flatten(1) @ weights["attention.output.weight"].T
        gate, up = (
            norm(x, weights["ffn_norm.weight"], config.rms_eps) @ weights["ffn.gate_up.weight"].T
        ).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ weights["ffn.down.weight"].T
    hidden = norm(x, target.norm.weight, config.rms_eps)

    w = dict(draft.named_parameters())
    x = target.embedding[tokens].detach()
    mixed = norm(x, w["self_norm.weight"], config.rms_eps) @ w["qkv.weight"].T
    mixed = mixed + w["qkv.bias"] if "qkv.bias" in w else mixed
    q, k, v = mixed.view(n, -1, size).split((heads, kv_heads, kv_heads), 1)
    near = causal & (where[:, None] - where < draft.config.window)
    x = (
        x
        + attend(turn(target, q, where), turn(target, k, where), v, near).flatten(1)
        @ w["self_output.weight"].T
    )
    if draft.config.use_feature:
        late = torch.stack([hidden[i - lag] if i >= lag else torch.zeros_like(x[0]) for i in range(n)])
        added = late @ w["feature.weight"].T
        if draft.config.lag_gate:
            scale, shift = (w[name].view(-1, added.shape[1])[lag - 1] for name in ("lag_scale", "lag_shift"))
            added = added * scale + shift
        x = x + added
    if draft.config.use_parent and lag > 1:
        above, _ = document_states(target, draft, tokens, positions, lag - 1)
        parents = torch.cat((torch.zeros_like(above[:1]), above[:-1]))
        x = x + norm(parents, w["parent_norm.weight"], config.rms_eps) @ w["parent.weight"].T
    mixed = norm(x, w["cross_norm.weight"], config.rms_eps) @ w["cross_q.weight"].T
    mixed = mixed + w["cross_q.bias"] if "cross_q.bias" in w else mixed
    queries = turn(target, mixed.view(n, -1, size), where).split(heads, 1)
    visible = place[None] <= place[:, None] - lag
    layers = draft.config.layers_of(config)
    outs = [attend(q, *kept[layer], visible) for layer, q in zip(layers, queries, strict=True)]
    x = x + torch.cat(outs, 1).flatten(1) @ w["cross_output.weight"].T
    gate, up = (norm(x, w["ffn_norm.weight"], config.rms_eps) @ w["ffn.gate_up.weight"].T).chunk(2, -1)
    x = x + (gate * gate.sigmoid() * up) @ w["ffn.down.weight"].T
    if draft.config.final_norm:
        x = norm(x, w["final_norm.weight"], config.rms_eps)
    return x, hidden


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(target: Transformer, heads: Tensor, positions: Tensor) -> Tensor:
    """Rotate [n, heads, D] as complex numbers."""
    half = heads.shape[-1] // 2
    angles = positions[:, None] * inverse_frequencies(target.config.rope, heads.shape[-1])
    pairs = (
        torch.complex(heads[..., :half], heads[..., half:])
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat((pairs.real, pairs.imag), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """[n, H, D] over [n, K, D]; a query that sees nothing gets zero."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)
