"""MagicDec: the target drafts for itself, looking only at the beginning and the end of its own KV."""

from __future__ import annotations

import torch
from torch import Tensor

from longspec.decoding.accept import mark
from longspec.decoding.choose import filtered
from longspec.decoding.rejection import draw_children
from longspec.decoding.round import Models, choose_rows, forward_chain_or_tree
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree


class MagicDec:
    """A chain of `gamma`. The drafted tokens' KV goes behind the prefix, where verification overwrites it.

    With a window as long as the context, the draft is the target, and everything is accepted.
    """

    name = "magicdec"
    drafts = False

    def __init__(self, gamma: int, sinks: int, window: int, draws: bool) -> None:
        self.gamma = gamma
        self.num_nodes, self.depth = gamma + 1, gamma
        self.tree_shape: tuple[int, ...] | None = (1,) * gamma
        self._sinks, self._window = sinks, window
        self.draws = draws

    def propose(self, models: Models, rows: Slots, sampled: bool) -> TokenTree:
        """See `Method.propose`."""
        tokens, proposals, seen = [rows.roots], [], rows.sampling.seen
        for depth in range(self.gamma):
            node = TokenTree.chain(tokens[-1][:, None])
            hidden = forward_chain_or_tree(models, rows, node, depth, self._sinks, self._window)
            logits, positions = models.target.logits(hidden[:, -1]), rows.lengths + depth + 1
            if self.draws:
                q = filtered(logits, rows.sampling, seen).softmax(-1)
                proposals.append(q)
                tokens.append(_draw(q, rows.seeds, positions, depth))
            else:
                tokens.append(choose_rows(models, rows, logits, positions, sampled, seen))
            if sampled:
                seen = mark(seen, tokens[-1])
        if not self.draws:
            return TokenTree.chain(torch.stack(tokens, 1))
        proposals.append(torch.zeros_like(proposals[-1]))  # the leaf has no children
        return TokenTree.chain(torch.stack(tokens, 1), torch.stack(proposals, 1))


def _draw(q: Tensor, seeds: Tensor, positions: Tensor, node: int) -> Tensor:
    nodes = torch.arange(node, node + 1, device=q.device)
    return draw_children(q[:, None], 1, seeds, positions, nodes)[0][:, 0, 0]
