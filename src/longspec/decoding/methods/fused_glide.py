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
from longspec.kernels.tree import Levels, claim_newest, prune
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.fused import DraftPass, cross_caches, run_level, run_root

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
    newest, positions, entries = claim_newest(
        state.emitted, state.num_emitted, lengths, ring.positions, ring.window, tree, said
    )
    run = DraftPass(
        draft,
        target,
        ring,
        cross_caches(state.cache, draft.config.layers_of(draft.target_config)),
        target.attention.plan(lengths, 1),
        parents,
    )
    features = draft.features(state.feature[:, None], len(shape))
    temperature, noises = 1.0, list[Tensor | None]([None] * len(shape))
    if not state.sampling.greedy:
        # The noise that the target's choice will have: what it makes likely there, it makes likely here.
        temperature = state.sampling.temperature
        noises = list(gumbel_noise(state.seeds, lengths, head.token_ids, 1, len(shape)))
    for depth, level in enumerate(levels[:-1]):
        if depth == 0:
            hidden = run_root(run, newest, features[0], positions, entries)
        else:
            nodes = tokens[:, level.start : level.stop]
            hidden = run_level(run, nodes, features[depth], level.start, depth)
        _grow(head(hidden), tree, level, len(levels[depth + 1]), temperature, noises[depth], head)
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
    logits: Tensor,
    tree: Levels,
    level: range,
    width: int,
    temperature: float,
    noise: Tensor | None,
    head: DraftHead,
) -> None:
    """Put the best children of a tree's last level behind it."""
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
