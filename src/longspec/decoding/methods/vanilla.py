"""Vanilla decoding: nothing is proposed, and each round emits the target's next choice."""

from __future__ import annotations

from collections.abc import Hashable

from longspec.decoding.loop import DecodeState
from longspec.decoding.tree import TokenTree


class Vanilla:
    """A tree of the root alone."""

    name = "vanilla"
    num_nodes, depth = 1, 0
    tree_shape: tuple[int, ...] | None = None
    device_key: tuple[Hashable, ...] | None = ("vanilla",)

    def begin(self, state: DecodeState) -> None:
        """See `Method.begin`."""

    def follow(self, state: DecodeState) -> None:
        """See `Method.follow`."""

    def propose(self, state: DecodeState) -> TokenTree:
        """See `Method.propose`."""
        return TokenTree.chain(state.roots[:, None])
