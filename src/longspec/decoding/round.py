"""One round: propose, verify, accept, commit. Fixed shapes and nothing asked of the host, where it is fused.

The plain form runs anywhere by torch's operations; the fused one runs by our own kernels, in few launches,
and can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longspec.attention import AttentionPlan
from longspec.cache import Pages
from longspec.decoding.accept import Accepted, LogitsAt, accept_coupled
from longspec.decoding.choose import choose
from longspec.decoding.methods import Method
from longspec.decoding.rejection import accept_rejection
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree
from longspec.models.draft import ContextHead, DraftHead, GlideDraft
from longspec.models.passes import paged_pass
from longspec.models.target import Transformer

# Up to so many nodes their logits cost hardly more than those of one: the head is read once for all.
_FEW_NODES = 16


@dataclass
class Models:
    """What rounds compute with."""

    target: Transformer
    pages: Pages
    fused: bool
    """Whether rounds run by our own kernels; settled once, when the engine is made."""
    draft: GlideDraft | None = None
    head: DraftHead | ContextHead | None = None
    """The target's head as the draft uses it."""
    exact: bool = False
    """Whether a token's bits depend on its text alone, and not on what is computed beside it."""


def run_round(models: Models, rows: Slots, method: Method, sampled: bool) -> None:
    """One round of the rows that are running and active; `rows.report` tells what they emitted.

    Where not `sampled`, all of them are greedy and have no repetition penalty.
    """
    tree = method.propose(models, rows, sampled)
    agree = models.target.agree
    tree = replace(tree, tokens=agree(tree.tokens), parents=agree(tree.parents))
    if models.fused:
        _finish_fused(models, rows, method, tree, sampled)
        return
    hidden = forward_chain_or_tree(models, rows, tree)
    accept = accept_rejection if method.draws else accept_coupled
    found = _agreed(models.target, accept(tree, _logits_at(models.target, hidden), rows, sampled))
    settle(models.pages, rows, tree, hidden, found, accumulate=not method.uses_draft)


def _agreed(target: Transformer, found: Accepted) -> Accepted:
    """What all processes that share the target keep."""
    return Accepted(target.agree(found.path), target.agree(found.num_accepted), target.agree(found.bonus))


def _finish_fused(models: Models, rows: Slots, method: Method, tree: TokenTree, sampled: bool) -> None:
    """Verify, accept and commit in few launches."""
    from longspec.kernels.choose import choose_tokens
    from longspec.kernels.commit import commit_path
    from longspec.kernels.exact import Paths
    from longspec.kernels.settle import settle_round
    from longspec.kernels.tree import tree_sees

    target, pages, lengths = models.target, models.pages, rows.lengths
    path_shape = (*tree.parents.shape, method.depth + 1)
    nodes = tree.parents.new_empty(path_shape) if models.exact else None
    sees, positions, places = tree_sees(tree.parents, method.depth, lengths, rows.tables, pages.size, nodes)
    seen = None if tree.num_nodes == 1 else sees
    paths = None if nodes is None else Paths(positions, nodes)
    plan = AttentionPlan(lengths, rows.tables, pages.size, tree.num_nodes, seen, paths=paths)
    hidden = target(tree.tokens, paged_pass(target, pages, positions, places, plan, True))
    logits = target.logits(hidden, models.exact)
    if method.draws:
        index = torch.arange(rows.num_rows, device=logits.device)
        found = _agreed(target, accept_rejection(tree, lambda nodes: logits[index, nodes], rows, sampled))
        settle(pages, rows, tree, hidden, found, accumulate=not method.uses_draft)
        return
    path = (tree.tokens, tree.parents, method.depth)
    flat, at = logits.flatten(0, 1), positions.flatten()
    choices = choose_tokens(flat, rows.sampling, rows.seeds, at, sampled, ahead=1, path=path)
    choices = target.agree(choices).view(tree.tokens.shape)
    kept, num_kept, before = settle_round(
        tree.tokens, tree.parents, choices, hidden, rows, method.depth + 1, accumulate=not method.uses_draft
    )
    if not tree.is_chain:
        commit_path(pages.keys, pages.values, before, rows.tables, pages.size, kept, num_kept)


def forward_chain_or_tree(
    models: Models, rows: Slots, tree: TokenTree, behind: int = 0, sinks: int = 0, window: int | None = None
) -> Tensor:
    """The target's hidden states [B, N, E] at the nodes of a tree that stands `behind` so many further
    tokens past each row's prefix. With a window, of what comes before only the first `sinks` entries and the
    last `window` ones are seen."""
    target, pages = models.target, models.pages
    sees = tree.sees()
    nodes = torch.arange(tree.num_nodes, device=rows.lengths.device)
    lengths = rows.lengths + behind
    depths = nodes if sees is None else sees.sum(-1) - 1
    positions = (lengths[:, None] + depths).expand_as(tree.tokens).contiguous()
    places = pages.places(rows.tables, lengths[:, None] + nodes)
    plan = AttentionPlan(lengths, rows.tables, pages.size, tree.num_nodes, sees, sinks, window)
    if models.exact and sees is None and window is None:
        from longspec.kernels.exact import chain_paths

        plan = replace(plan, paths=chain_paths(positions))
    return target(tree.tokens, paged_pass(target, pages, positions, places, plan, models.fused))


def choose_rows(
    models: Models, rows: Slots, logits: Tensor, positions: Tensor, sampled: bool, seen: Tensor
) -> Tensor:
    """The choice of each row, int64 [B], by logits [B, V] for the tokens at `positions` [B]; `seen` [B, V]
    are the tokens before them."""
    if not models.fused:
        return choose(logits, rows.sampling, rows.seeds, positions, sampled, seen)
    from longspec.kernels.choose import choose_tokens

    sampling = replace(rows.sampling, seen=seen)
    tokens = choose_tokens(logits, sampling, rows.seeds, positions, sampled)
    # Before a capture all of this runs without our kernels, and then no token is one.
    return tokens.clamp(0, logits.shape[1] - 1)


def settle(
    pages: Pages, rows: Slots, tree: TokenTree, hidden: Tensor, found: Accepted, accumulate: bool
) -> None:
    """Commit what was accepted in the rows that move, and note what follows from it. Asks nothing of the
    host. With `accumulate`, the draft has not read what was emitted before."""
    moving, lengths = rows.running & rows.active, rows.lengths
    num_kept = (found.num_accepted + 1) * moving
    if not tree.is_chain:
        pages.commit(rows.tables, lengths, found.path, num_kept)
    # The path without the root, then the bonus right behind each row's last accepted token.
    emitted = torch.cat((tree.tokens.gather(1, found.path)[:, 1:], found.bonus[:, None]), 1)
    emitted.scatter_(1, found.num_accepted[:, None], found.bonus[:, None])
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    real = steps < num_kept[:, None]
    _note_text(rows, emitted, real)
    index = torch.arange(rows.num_rows, device=hidden.device)
    rows.feature.copy_(torch.where(moving[:, None], hidden[index, found.path[:, -1]], rows.feature))
    rows.report[:, 0] = num_kept
    rows.report[:, 1 : 1 + emitted.shape[1]] = emitted
    before = rows.num_unread if accumulate else torch.zeros_like(num_kept)
    rows.num_unread.copy_(torch.where(moving, before + num_kept, rows.num_unread))
    hit = ((emitted[:, :, None] == rows.eos_ids[:, None]).any(-1) & real).any(-1)
    ended = moving & (hit | (lengths + num_kept + 1 >= rows.limits))
    rows.running.logical_and_(~ended)
    # A round may run past a row's limit; there is room for its nodes only behind the limit itself.
    lengths.copy_(torch.where(moving, torch.minimum(lengths + num_kept, rows.limits - 1), lengths))


def _note_text(rows: Slots, emitted: Tensor, real: Tensor) -> None:
    """Write what was emitted [B, P], as far as it is `real`, behind the rows' texts, and mark it as seen."""
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    places = rows.lengths[:, None] + 1 + steps
    # The last column takes what nobody wants.
    places = torch.where(real & (places < rows.limits[:, None]), places, rows.text.shape[1] - 1)
    rows.text.scatter_(1, places, emitted)
    # Behind a row's own tokens its root stands in, which was seen.
    rows.sampling.seen.scatter_(1, torch.where(real, emitted, rows.roots[:, None]), True)


def _logits_at(target: Transformer, hidden: Tensor) -> LogitsAt:
    """The logits of a node per row: of small trees all at once, of larger ones where they are asked for."""
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    if hidden.shape[1] <= _FEW_NODES:
        logits = target.logits(hidden)
        return lambda nodes: logits[rows, nodes]
    return lambda nodes: target.logits(hidden[rows, nodes])
