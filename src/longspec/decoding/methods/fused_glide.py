"""GLIDE's tree by fused kernels: fixed shapes, nothing asked of the host, few launches a level."""

from __future__ import annotations

import torch
from torch import Tensor

from longspec.cache import DraftCache
from longspec.decoding.copied import DOUBT, FADE, LEAST, MOST, Text
from longspec.decoding.loop import DecodeState
from longspec.decoding.methods.glide import best_of_level
from longspec.decoding.tree import TokenTree
from longspec.kernels.copied import graft_copied
from longspec.kernels.noise import gumbel_noise
from longspec.kernels.topk import best_children
from longspec.kernels.tree import Levels, claim_newest, level_places, prune
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.fused import DraftPass, cross_caches, run_draft, write_draft

# Wider levels are faster by torch's own top-k.
_WIDEST = 32


def propose_tree(
    state: DecodeState,
    drafting: tuple[GlideDraft, DraftHead],
    ring: DraftCache,
    shape: tuple[int, ...],
    max_nodes: int,
    copying: tuple[Text, int] | None = None,
) -> TokenTree:
    """What `Glide.propose` proposes where children are chosen by score."""
    (draft, head), (text, num_copied) = drafting, copying or (None, 0)
    lengths, target = state.cache.lengths, state.target
    vocab = target.config.vocab_size if head.vocab_ids is None else len(head.vocab_ids)
    levels = level_ranges(shape, vocab)
    size = (len(state.rows), levels[-1].stop + num_copied)
    tokens, parents = torch.empty(2, *size, dtype=torch.int64, device=lengths.device).unbind(0)
    tree = (tokens, parents, torch.empty(size, device=lengths.device))
    said = None if text is None else text.tokens
    positions, entries = claim_newest(
        state.emitted, state.num_emitted, lengths, ring.positions, ring.window, tree, said
    )
    write_draft(draft, state.emitted, target, positions, (ring.keys, ring.values, entries))
    run = DraftPass(
        draft,
        target,
        cross_caches(state.cache, draft.config.layers_of(draft.target_config)),
        target.attention.plan(lengths, 1),
    )
    features = draft.features(state.feature[:, None], len(shape))
    for depth, level in enumerate(levels[:-1]):
        sees, positions, entries = level_places(ring.positions, lengths, parents, level, depth, ring.window)
        place = (ring.keys, ring.values, entries)
        new = tokens[:, level.start : level.stop]
        hidden = run_draft(run, new, features[depth], positions, place, sees)
        _grow(state, head, hidden, tree, level, len(levels[depth + 1]), depth)
    if text is not None:
        chances = (LEAST, MOST, DOUBT, FADE)
        graft_copied(tree, levels[-1].stop, text.tokens, text.best, lengths, chances)
    if max_nodes >= size[1]:
        return TokenTree(tokens, parents)
    return TokenTree(*prune(*tree, max_nodes))


def level_ranges(shape: tuple[int, ...], vocab: int) -> list[range]:
    """The nodes of each level, the root's first: as many as the shape says, or as there can be."""
    levels = [range(1)]
    for width in shape:
        last = levels[-1]
        levels.append(range(last.stop, last.stop + min(width, len(last) * vocab)))
    return levels


def _grow(
    state: DecodeState, head: DraftHead, hidden: Tensor, tree: Levels, level: range, width: int, depth: int
) -> None:
    """Put the best children of a tree's last level, `depth` deep, behind it."""
    logits = head(hidden)
    noise, temperature = None, 1.0
    if not state.sampling.greedy:
        # The noise that the target's choice will have: what it makes likely there, it makes likely here.
        noise = gumbel_noise(state.seeds, state.cache.lengths, head.token_ids, depth + 1)
        temperature = state.sampling.temperature
    if width <= _WIDEST:
        best_children(logits, tree, level, width, temperature, noise, head.vocab_ids)
        return
    if noise is not None:
        logits = logits / temperature + noise[:, None]
    tokens, parents, scores = tree
    indices, above, best = best_of_level(logits, scores[:, level.start : level.stop], width)
    behind = slice(level.stop, level.stop + width)
    tokens[:, behind] = head.token_ids[indices]
    parents[:, behind] = level.start + above
    scores[:, behind] = best
