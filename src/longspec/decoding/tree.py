"""The token tree: what a round proposes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenTree:
    """Proposed tokens of B rows as nodes of a tree each. Node 0 is the root, the newest emitted token.

    All rows have N nodes. A row with less to propose is filled up with arbitrary nodes. That is safe, because
    a node is accepted only if it is the target's choice.
    """

    tokens: Tensor
    """int64 [B, N]"""
    parents: Tensor
    """The parent of each node, int64 [B, N], always before its children; the root's is itself."""
    proposals: Tensor | None = None
    """For `rejection`: the distribution from which each node's children were drawn, without replacement, in
    the nodes' order, fp32 [B, N, V]. None: each child was certain to be proposed."""
    is_chain: bool = False
    """Whether each node is the only child of the one before, so that no path has to be moved."""
    shape: tuple[int, ...] | None = None
    """Nodes per depth, if every node of a depth has the same number of children; otherwise None."""

    @classmethod
    def chain(cls, tokens: Tensor, proposals: Tensor | None = None) -> TokenTree:
        """A tree in which each node is the only child of the one before."""
        if tokens.shape[1] == 1:
            return cls(tokens, torch.zeros_like(tokens), proposals, True)
        parents = (torch.arange(tokens.shape[1], device=tokens.device) - 1).clamp(min=0)
        return cls(tokens, parents.expand_as(tokens), proposals, True)

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def depth(self) -> int:
        """An upper bound on the length of a path, without the root."""
        return self.num_nodes - 1 if self.shape is None else len(self.shape)

    @property
    def num_children(self) -> int:
        """An upper bound on the children of a node."""
        if self.is_chain or self.num_nodes == 1:
            return 1
        if self.shape is None:
            return self.num_nodes - 1
        return max(n // above for n, above in zip(self.shape, (1, *self.shape), strict=False))

    def sees(self) -> Tensor | None:
        """Which nodes each node sees, itself and its ancestors, bool [B, N, N]; None for a lone root."""
        if self.num_nodes == 1:
            return None
        return ancestors(self.parents)

    def pruned(self, scores: Tensor, max_nodes: int) -> TokenTree:
        """The `max_nodes` nodes with the best scores [B, N], and the root is one of them.

        No score may exceed its parent's, so that the best nodes are a tree again.
        """
        if max_nodes >= self.num_nodes:
            return self
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :max_nodes]
        kept = order.sort(dim=1).values
        places = torch.zeros_like(self.tokens)
        places.scatter_(1, kept, torch.arange(max_nodes, device=kept.device).expand_as(kept))
        return TokenTree(self.tokens.gather(1, kept), places.gather(1, self.parents.gather(1, kept)))


def ancestors(parents: Tensor) -> Tensor:
    """Each node with its ancestors, bool [B, N, N], from parents [B, N]."""
    B, N = parents.shape
    sees = torch.eye(N, dtype=torch.bool, device=parents.device).expand(B, N, N)
    # Pointer jumping: each pass doubles the distance up to which ancestors are known.
    reach = 1
    while reach < N:
        sees = sees | sees.gather(1, parents[:, :, None].expand(B, N, N))
        parents = parents.gather(1, parents)
        reach *= 2
    return sees
