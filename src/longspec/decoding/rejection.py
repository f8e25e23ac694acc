"""The standard acceptance criterion: it keeps the target's distribution, not the tokens of a seed.

A child c drawn from q is accepted with probability min(1, p(c) / q(c)). If it is rejected, p becomes the
normalised positive part of p - q, c is removed from q (children are drawn without replacement), and the next
child is tried. When no child is left, the token is drawn from the changed p. A child that was certain to be
proposed is the case where all of q's mass is on c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspec.decoding.accept import Accepted, LogitsAt, Walk, mark
from longspec.decoding.choose import derived, filtered, gumbel, uniform
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree

# Streams of noise. They must be independent of each other and of the noise of coupled choices.
_DRAW, _ACCEPT, _BONUS = 1, 2, 3


def draw_children(
    q: Tensor, num_children: int, seeds: Tensor, positions: Tensor, nodes: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens drawn without replacement from q [B, n, V], in order: int64 [B, n, num_children].

    nodes [n] are the parents' indices in the tree, so that each parent has noise of its own. The second
    result says which children were drawn: where q has fewer tokens than children, the rest were not.
    """
    B, n, V = q.shape
    tokens = torch.arange(V, device=q.device)
    streams = derived(derived(seeds, _DRAW)[:, None], nodes).flatten()
    noise = gumbel(streams, positions[:, None].expand(B, n).flatten(), tokens).view(B, n, V)
    # Adding Gumbel noise and sorting is the same as drawing one by one without replacement.
    top = (q.double().log() + noise).topk(min(num_children, V), -1)
    return top.indices, torch.isfinite(top.values)


def accept_rejection(tree: TokenTree, logits_at: LogitsAt, rows: Slots, sampled: bool) -> Accepted:
    """Walk from the root by the rule above; arguments and result as in `accept_coupled`."""
    assert sampled, "greedy rows are accepted by their choices"
    walk, sampling, seeds = Walk.at_root(tree), rows.sampling, rows.seeds
    children, seen = child_table(tree), sampling.seen
    index = torch.arange(tree.tokens.shape[0], device=tree.tokens.device)
    for depth in range(tree.num_nodes):
        positions = rows.lengths + depth + 1
        p = filtered(logits_at(walk.node), sampling, seen).double().softmax(-1)
        q = None if tree.proposals is None else tree.proposals[index, walk.node].double()
        found = torch.zeros_like(walk.moving)
        goal = walk.node
        for child in children[index, walk.node].unbind(1):
            there = (child >= 0) & ~found
            token = tree.tokens.gather(1, child.clamp(min=0)[:, None])[:, 0]
            luck = uniform(derived(seeds, _ACCEPT), positions, child)
            drawn, lucky = there & proposed(q, token), accepts(p, q, token, luck)
            goal = torch.where(drawn & lucky, child, goal)
            found = found | (drawn & lucky)
            refused = (drawn & ~lucky)[:, None]
            p = torch.where(refused, residual(p, q, token), p)
            if q is not None:
                q = torch.where(refused, without(q, token), q)
        noise = gumbel(derived(seeds, _BONUS), positions, torch.arange(p.shape[1], device=p.device))
        bonus = (p.log() + noise).argmax(-1)
        walk.step(found, goal, bonus)
        if walk.is_over or depth == tree.depth:
            break
        seen = mark(seen, tree.tokens.gather(1, walk.node[:, None])[:, 0])
    return walk.accepted()


def proposed(q: Tensor | None, token: Tensor) -> Tensor:
    """Whether q could have drawn the token, bool [B]."""
    return torch.ones_like(token, dtype=torch.bool) if q is None else _at(q, token) > 0


def accepts(p: Tensor, q: Tensor | None, token: Tensor, luck: Tensor) -> Tensor:
    """Whether the token is accepted, bool [B]; `luck` [B] is uniform on (0, 1)."""
    return luck < _at(p, token) if q is None else luck * _at(q, token) < _at(p, token)


def residual(p: Tensor, q: Tensor | None, token: Tensor) -> Tensor:
    """What p [B, V] becomes after the token was rejected."""
    left = p.scatter(1, token[:, None], 0.0) if q is None else (p - q).clamp(min=0)
    total = left.sum(1, keepdim=True)
    # The total is 0 only by rounding: such a rejection has probability 0.
    return torch.where(total > 0, left / total.clamp(min=torch.finfo(p.dtype).tiny), p)


def without(q: Tensor, token: Tensor) -> Tensor:
    """q [B, V] without the token, because it cannot be drawn again."""
    left = q.scatter(1, token[:, None], 0.0)
    return left / left.sum(1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def child_table(tree: TokenTree) -> Tensor:
    """The children of each node in their order, int64 [B, N, C]; -1 after the last one."""
    parents, N = tree.parents, tree.num_nodes
    nodes = torch.arange(N, device=parents.device)
    is_child = (parents[:, None, :] == nodes[None, :, None]) & (nodes > 0)
    # Sorting puts the children, by number, before the rest.
    order = torch.where(is_child, nodes, N).sort(-1).values[:, :, : tree.num_children]
    return torch.where(order < N, order, -1)


def _at(distribution: Tensor, token: Tensor) -> Tensor:
    return distribution.gather(1, token[:, None])[:, 0]
