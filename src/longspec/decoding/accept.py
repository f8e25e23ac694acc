"""Acceptance: which of the proposed tokens the target would have chosen itself.

Coupled acceptance, the default, walks from the root. At each node the target makes its own choice, by the
same pure function that vanilla decoding uses. If one of the node's children is that token, the walk moves
there; otherwise the token is the bonus and the round ends. So a round emits exactly what vanilla would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.decoding.choose import choose
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree

LogitsAt = Callable[[Tensor], Tensor]
"""The target's logits [B, V] at one node per row, int64 [B]."""


@dataclass(frozen=True)
class Accepted:
    """What a round keeps, for B rows."""

    path: Tensor
    """The accepted nodes from the root down, int64 [B, P]; after the end of a row its last node repeats."""
    num_accepted: Tensor
    """Drafted tokens kept, without the root, int64 [B]."""
    bonus: Tensor
    """The target's own token after the path, int64 [B]."""


@dataclass
class Walk:
    """The walk of all rows from the root, one depth at a time. A row whose token is not a child stops."""

    tree: TokenTree
    node: Tensor
    moving: Tensor
    bonus: Tensor
    steps: list[Tensor]
    num_accepted: Tensor

    @classmethod
    def at_root(cls, tree: TokenTree) -> Walk:
        zeros = torch.zeros_like(tree.tokens[:, 0])
        return cls(tree, zeros, torch.ones_like(zeros, dtype=torch.bool), zeros, [zeros], zeros)

    def step(self, found: Tensor, child: Tensor, bonus: Tensor) -> None:
        """Move the rows where `found` [B] is set to `child` [B]; the others end with `bonus`."""
        moved = self.moving & found
        self.bonus = torch.where(self.moving & ~found, bonus, self.bonus)
        self.node = torch.where(moved, child, self.node)
        self.num_accepted = self.num_accepted + moved.long()
        self.moving = moved
        self.steps.append(self.node)

    @property
    def is_over(self) -> bool:
        """Whether all rows have stopped. False on a GPU, because reading the answer would wait for it."""
        return not self.moving.is_cuda and not bool(self.moving.any())

    def accepted(self) -> Accepted:
        return Accepted(torch.stack(self.steps, 1), self.num_accepted, self.bonus)


def accept_coupled(tree: TokenTree, logits_at: LogitsAt, rows: Slots, sampled: bool) -> Accepted:
    """Walk while the target's choice is among the children. Logits are taken only at nodes of the walk.

    The root stands at `rows.lengths` of the text, and is marked in `seen` already.
    """
    walk, seen = Walk.at_root(tree), rows.sampling.seen
    for depth in range(tree.num_nodes):
        logits = logits_at(walk.node)
        choice = choose(logits, rows.sampling, rows.seeds, rows.lengths + depth + 1, sampled, seen)
        matches = (tree.parents == walk.node[:, None]) & (tree.tokens == choice[:, None])
        matches[:, 0] = False  # the root is its own parent
        walk.step(matches.any(1), matches.long().argmax(1), choice)
        if walk.is_over:
            break
        if sampled:
            seen = mark(seen, choice)
    return walk.accepted()


def mark(seen: Tensor, tokens: Tensor) -> Tensor:
    """`seen` [B, V] with one more token per row."""
    # Clamped, because tokens are arbitrary while kernels are only compiled (`compile_for`).
    return seen.scatter(1, tokens.clamp(0, seen.shape[1] - 1)[:, None], True)
