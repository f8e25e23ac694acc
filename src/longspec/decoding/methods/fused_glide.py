"""GLIDE's tree by fused kernels: fixed shapes, nothing asked of the host, few launches a level."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.cache import DraftCache
from longspec.decoding.loop import DecodeState
from longspec.decoding.methods.glide import best_of_level
from longspec.decoding.tree import TokenTree
from longspec.kernels.noise import gumbel_noise
from longspec.kernels.topk import best_children
from longspec.kernels.tree import claim_newest, level_places, prune
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.fused import DraftPass, cross_caches, run_draft, write_draft

# Wider levels are faster by torch's own top-k.
_WIDEST = 32


def propose_tree(
    state: DecodeState,
    draft: GlideDraft,
    head: DraftHead,
    ring: DraftCache,
    shape: tuple[int, ...],
    max_nodes: int,
) -> TokenTree:
    """What `Glide.propose` proposes where children are chosen by score."""
    lengths, table = state.cache.lengths, state.target.rope.table
    positions, entries = claim_newest(
        state.num_emitted, lengths, ring.positions, state.emitted.shape[1], ring.window
    )
    embedded = F.embedding(state.emitted, state.target.embedding)
    write_draft(draft, embedded, table, positions, (ring.keys, ring.values, entries))
    run = DraftPass(
        draft,
        table,
        state.target.attention,
        cross_caches(state.cache, draft.config.layers_of(draft.target_config)),
        state.target.attention.plan(lengths, 1),
        draft.project_feature(state.feature[:, None]),
    )
    tokens, parents = [state.roots[:, None]], torch.zeros_like(state.roots)[:, None]
    scores = [torch.zeros_like(parents, dtype=torch.float32)]
    for depth, width in enumerate(shape):
        n = tokens[-1].shape[1]
        sees, positions, entries = level_places(ring.positions, lengths, parents, n, depth, ring.window)
        x = F.embedding(tokens[-1], state.target.embedding)
        hidden = run_draft(run, x, positions, (ring.keys, ring.values, entries), sees)
        first = parents.shape[1] - n
        chosen, above, total = _best_level(state, head, hidden, scores[-1], width, depth, first)
        tokens.append(chosen)
        scores.append(total)
        parents = torch.cat((parents, above), 1)
    tree = TokenTree(torch.cat(tokens, 1), parents)
    if max_nodes >= tree.num_nodes:
        return tree
    return TokenTree(*prune(tree.tokens, tree.parents, torch.cat(scores, 1), max_nodes))


def _best_level(
    state: DecodeState, head: DraftHead, hidden: Tensor, scores: Tensor, width: int, depth: int, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and scores [B, w] of the best children of a level, whose nodes begin at `first`."""
    logits = head(hidden)
    noise, temperature = None, 1.0
    if not state.sampling.greedy:
        # The noise that the target's choice will have: what it makes likely there, it makes likely here.
        noise = gumbel_noise(state.seeds, state.cache.lengths + depth + 1, head.token_ids)
        temperature = state.sampling.temperature
    if width <= _WIDEST:
        return best_children(logits, scores, width, temperature, noise, head.vocab_ids, first)
    if noise is not None:
        logits = logits / temperature + noise[:, None]
    indices, parents, total = best_of_level(logits, scores, width)
    return head.token_ids[indices], first + parents, total
