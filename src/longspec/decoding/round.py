"""One round: propose, verify, accept, commit.

Plain rounds use torch's operations and run on any device. Fused rounds use our own kernels in few launches,
have fixed shapes and read nothing back to the host, so that they can be captured in a CUDA graph.
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
from longspec.decoding.native_round import choose_tokens, describe_nodes, has_code, is_native, settle_round
from longspec.decoding.rejection import accept_rejection
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree
from longspec.models.draft import ContextHead, DraftHead, GlideDraft
from longspec.models.passes import paged_pass
from longspec.models.target import Transformer

# The logits of up to this many nodes cost hardly more than those of one, because the head is read once.
_FEW_NODES = 16


@dataclass
class Models:
    """The models of a round, and the target's KV."""

    target: Transformer
    pages: Pages
    fused: bool
    """Whether rounds use our own kernels; decided once, when the engine is made."""
    draft: GlideDraft | None = None
    head: DraftHead | ContextHead | None = None
    """The target's head as the draft uses it."""
    exact: bool = False
    """Whether a token's numbers have the same bits whatever is computed beside it."""


def run_round(models: Models, rows: Slots, method: Method, sampled: bool) -> None:
    """One round of the rows that are running and active; `rows.report` has what they emitted.

    If not `sampled`, all of them are greedy and have no repetition penalty.
    """
    tree = method.propose(models, rows, sampled)
    agree = models.target.agree
    tree = replace(tree, tokens=agree(tree.tokens), parents=agree(tree.parents))
    if models.fused:
        _finish_fused(models, rows, method, tree, sampled)
        return
    hidden = forward_chain_or_tree(models, rows, tree)
    if not method.draws and tree.num_nodes <= _FEW_NODES and is_native(hidden):
        _finish_native(models, rows, method, tree, hidden, sampled)
        return
    accept = accept_rejection if method.draws else accept_coupled
    found = _agreed(models.target, accept(tree, _logits_at(models.target, hidden), rows, sampled))
    settle(models.pages, rows, tree, hidden, found, accumulate=not method.uses_draft)


def _agreed(target: Transformer, found: Accepted) -> Accepted:
    """The same result in all processes that share the target."""
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


def _finish_native(
    models: Models, rows: Slots, method: Method, tree: TokenTree, hidden: Tensor, sampled: bool
) -> None:
    """Choose at every node, accept and commit, by our C code."""
    target, lengths = models.target, rows.lengths
    logits, at, path = target.logits(hidden).flatten(0, 1), tree.tokens, None
    if sampled:
        at = describe_nodes(tree.parents, tree.is_chain, lengths + 1, rows.tables, models.pages.size)[1]
        path = tree.tokens, tree.parents
    choices = choose_tokens(logits, rows.sampling, rows.seeds, at.flatten(), sampled, path)
    choices = target.agree(choices).view(tree.tokens.shape)
    width = min(tree.num_nodes, method.depth + 1)
    moved = settle_round(tree, choices, hidden, rows, width, accumulate=not method.uses_draft)
    if moved is not None:
        kept, num_kept, before = moved
        models.pages.commit(rows.tables, before, kept, num_kept)


def forward_chain_or_tree(
    models: Models, rows: Slots, tree: TokenTree, behind: int = 0, sinks: int = 0, window: int | None = None
) -> Tensor:
    """The target's hidden states [B, N, E] at the nodes of a tree that starts `behind` tokens after each
    row's prefix. With a window, a node sees only the first `sinks` and the last `window` entries there."""
    target, pages = models.target, models.pages
    lengths = rows.lengths + behind if behind else rows.lengths
    if has_code(lengths):
        sees, positions, places = describe_nodes(
            tree.parents, tree.is_chain, lengths, rows.tables, pages.size
        )
    else:
        sees = tree.sees()
        nodes = torch.arange(tree.num_nodes, device=lengths.device)
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
    """The choice of each row, int64 [B], from logits [B, V] for the tokens at `positions` [B]; `seen` [B, V]
    marks the tokens before them."""
    if not models.fused:
        return choose(logits, rows.sampling, rows.seeds, positions, sampled, seen)
    from longspec.kernels.choose import choose_tokens

    sampling = replace(rows.sampling, seen=seen)
    tokens = choose_tokens(logits, sampling, rows.seeds, positions, sampled)
    # Clamped, because tokens are arbitrary while kernels are only compiled (`compile_for`).
    return tokens.clamp(0, logits.shape[1] - 1)


def settle(
    pages: Pages, rows: Slots, tree: TokenTree, hidden: Tensor, found: Accepted, accumulate: bool
) -> None:
    """Commit the accepted path of the rows that are running and active, and update their slots. Reads nothing
    back to the host. With `accumulate`, the draft has not read the tokens of earlier rounds either. If the
    target's numbers are not finite, the first reported token is -1."""
    moving, lengths = rows.running & rows.active, rows.lengths
    num_kept = (found.num_accepted + 1) * moving
    if not tree.is_chain:
        pages.commit(rows.tables, lengths, found.path, num_kept)
    # The path without the root, then the bonus right after each row's last accepted token.
    emitted = torch.cat((tree.tokens.gather(1, found.path)[:, 1:], found.bonus[:, None]), 1)
    emitted.scatter_(1, found.num_accepted[:, None], found.bonus[:, None])
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    real = steps < num_kept[:, None]
    _note_text(rows, emitted, real)
    last = hidden[torch.arange(rows.num_rows, device=hidden.device), found.path[:, -1]]
    rows.feature.copy_(torch.where(moving[:, None], last, rows.feature))
    rows.report[:, 0] = num_kept
    rows.report[:, 1 : 1 + emitted.shape[1]] = emitted
    rows.report[:, 1].masked_fill_(moving & ~last.isfinite().all(-1), -1)
    before = rows.num_unread if accumulate else torch.zeros_like(num_kept)
    rows.num_unread.copy_(torch.where(moving, before + num_kept, rows.num_unread))
    hit = ((emitted[:, :, None] == rows.eos_ids[:, None]).any(-1) & real).any(-1)
    ended = moving & (hit | (lengths + num_kept + 1 >= rows.limits))
    rows.running.logical_and_(~ended)
    # A round may run past a row's limit, but the next round's nodes must start at the limit at the latest.
    lengths.copy_(torch.where(moving, torch.minimum(lengths + num_kept, rows.limits - 1), lengths))


def _note_text(rows: Slots, emitted: Tensor, real: Tensor) -> None:
    """Append the emitted tokens [B, P] that are `real` to the rows' texts, and mark them as seen."""
    steps = torch.arange(emitted.shape[1], device=emitted.device)
    places = rows.lengths[:, None] + 1 + steps
    # The other tokens go to the last column, which is never read.
    places = torch.where(real & (places < rows.limits[:, None]), places, rows.text.shape[1] - 1)
    rows.text.scatter_(1, places, emitted)
    # In their place the root is marked, which is marked already.
    rows.sampling.seen.scatter_(1, torch.where(real, emitted, rows.roots[:, None]), True)


def _logits_at(target: Transformer, hidden: Tensor) -> LogitsAt:
    """The logits of one node per row: computed at once for all nodes of small trees, for larger ones when
    asked."""
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    if hidden.shape[1] <= _FEW_NODES:
        logits = target.logits(hidden)
        return lambda nodes: logits[rows, nodes]
    return lambda nodes: target.logits(hidden[rows, nodes])
