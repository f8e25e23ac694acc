"""Prompt lookup: what followed the same few tokens before is proposed again. It needs no draft."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longspec.decoding.lookup import DOUBT, FADE, find, graft
from longspec.decoding.round import Models
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree


class Lookup:
    """A chain of up to `gamma` tokens, from behind the newest earlier place that matches best."""

    name = "lookup"
    drafts = draws = False

    def __init__(self, gamma: int, max_ngram: int = 3, min_ngram: int = 2) -> None:
        self.gamma = gamma
        self.num_nodes, self.depth = gamma + 1, gamma
        self.tree_shape: tuple[int, ...] | None = (1,) * gamma
        self._runs = (min_ngram, max_ngram)

    def find(self, rows: Slots) -> tuple[Tensor, Tensor]:
        """The longest matching run of each row, 0 where there is none, and what follows it: [B] each."""
        ends = rows.lengths + 1
        return find(rows.text[:, : int(ends.max())], ends, *self._runs)

    def propose(self, models: Models, rows: Slots, sampled: bool) -> TokenTree:
        """See `Method.propose`. Where no row has a match, the plain form proposes nothing."""
        if models.fused:
            return self._propose_fused(rows)
        root = TokenTree.chain(rows.roots[:, None])
        found = self.find(rows)
        if not bool((found[0] > 0).any()):
            return root
        scores = torch.zeros(root.tokens.shape, device=root.tokens.device)
        tree, _ = graft(root, scores, rows.text, rows.lengths + 1, self.gamma, found)
        # A row with a match has a chain, and one without has at most its first node accepted.
        return replace(tree, is_chain=True)

    def _propose_fused(self, rows: Slots) -> TokenTree:
        from longspec.kernels.lookup import graft_lookup

        size, device = (rows.num_rows, self.num_nodes), rows.lengths.device
        tokens, parents = torch.zeros(2, *size, dtype=torch.int64, device=device).unbind(0)
        tokens[:, 0] = rows.roots
        scores = torch.zeros(size, device=device)
        chances = (*self._runs, DOUBT, FADE)
        graft_lookup((tokens, parents, scores), 1, rows.text, rows.found, rows.lengths, chances)
        return TokenTree(tokens, parents, is_chain=True)
