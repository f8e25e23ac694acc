"""Vanilla decoding: nothing is proposed, and each round emits the target's next choice."""

from __future__ import annotations

from longspec.decoding.round import Models
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree


class Vanilla:
    """A tree of the root alone."""

    name = "vanilla"
    num_nodes, depth = 1, 0
    tree_shape: tuple[int, ...] | None = None
    drafts = draws = False

    def propose(self, models: Models, rows: Slots, sampled: bool) -> TokenTree:
        """See `Method.propose`."""
        return TokenTree.chain(rows.roots[:, None])
