"""Vanilla decoding: nothing is proposed; each round emits the target's next choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspec.decoding.methods.base import Method
from longspec.decoding.methods.registry import register

if TYPE_CHECKING:
    from longspec.decoding.round import Models
    from longspec.decoding.slots import Slots
    from longspec.decoding.tree import TokenTree


@register
@dataclass(frozen=True)
class Vanilla(Method):
    """A tree with only the root."""

    name = "vanilla"
    summary = "the target alone"

    @property
    def num_nodes(self) -> int:
        return 1

    def propose(self, models: Models, rows: Slots, sampled: bool) -> TokenTree:
        from longspec.decoding.tree import TokenTree

        return TokenTree.chain(rows.roots[:, None])


VANILLA = Vanilla()
