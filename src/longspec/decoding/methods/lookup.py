"""Prompt lookup: proposes what followed the same tokens earlier in the text. It needs no draft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from longspec.decoding.expected import FIRST_DOUBT, MAX_RUN, MIN_RUN, NEXT_DOUBT, chain_gain, lookup_rates
from longspec.decoding.methods.base import Chain
from longspec.decoding.methods.registry import register
from longspec.option import option

if TYPE_CHECKING:
    from torch import Tensor

    from longspec.config import DraftConfig
    from longspec.decoding.round import Models
    from longspec.decoding.slots import Slots
    from longspec.decoding.tree import TokenTree

# The chains that `auto` considers.
GAMMAS = (2, 4, 7)
# The run of tokens that is assumed to match where it is not known.
ASSUMED_RUN = 3


@register
@dataclass(frozen=True)
class Lookup(Chain):
    """The chain that follows the best match; of equal matches, the newest."""

    name = "lookup"
    summary = "what followed the same few tokens earlier in the text"
    source = "lookup"

    max_ngram: int = option(MAX_RUN, "longest run of tokens that is matched", least=1, most=16)

    def gain(self, acceptance: Mapping[str, Any], run: int | None = None) -> float:
        """For a row that has a match."""
        return chain_gain(lookup_rates(ASSUMED_RUN if run is None else run, self.gamma))

    @classmethod
    def candidates(
        cls, draft: DraftConfig | None, acceptance: Mapping[str, Any], fused: bool
    ) -> Iterable[Lookup]:
        """None with a draft and fused rounds, because the draft's trees look up as well."""
        return [cls(gamma) for gamma in GAMMAS] if draft is None or not fused else []

    @property
    def _runs(self) -> tuple[int, int]:
        """The shortest and the longest run of tokens that is a match."""
        return min(MIN_RUN, self.max_ngram), self.max_ngram

    def find(self, rows: Slots) -> tuple[Tensor, Tensor]:
        """The longest matching run of each row, 0 if there is none, and where it continues: [B] each."""
        from longspec.decoding.lookup import find

        return find(rows.text, rows.lengths + 1, *self._runs)

    def propose(self, models: Models, rows: Slots, sampled: bool) -> TokenTree:
        """In plain rounds, nothing is proposed if no row has a match."""
        import torch

        from longspec.decoding.lookup import graft
        from longspec.decoding.tree import TokenTree

        if models.fused:
            return self._propose_fused(rows)
        root = TokenTree.chain(rows.roots[:, None])
        found = self.find(rows)
        if not bool((found[0] > 0).any()):
            return root
        scores = torch.zeros(root.tokens.shape, dtype=torch.float32, device=root.tokens.device)
        tree, _ = graft(root, scores, rows.text, rows.lengths + 1, self.gamma, found)
        # A row with a match has a chain. A row without one has at most its first node accepted.
        return replace(tree, is_chain=True)

    def _propose_fused(self, rows: Slots) -> TokenTree:
        import torch

        from longspec.decoding.tree import TokenTree
        from longspec.kernels.lookup import graft_lookup

        size, device = (rows.num_rows, self.num_nodes), rows.lengths.device
        tokens, parents = torch.zeros(2, *size, dtype=torch.int64, device=device).unbind(0)
        tokens[:, 0] = rows.roots
        scores = torch.zeros(size, dtype=torch.float32, device=device)
        chances = (*self._runs, FIRST_DOUBT, NEXT_DOUBT)
        graft_lookup((tokens, parents, scores), 1, rows.text, rows.found, rows.lengths, chances)
        return TokenTree(tokens, parents, is_chain=True)
