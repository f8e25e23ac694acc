"""MagicDec: the target drafts for itself and reads only the beginning and the end of its own KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from longspec.decoding.expected import chain_gain, chain_rates
from longspec.decoding.methods.base import Chain
from longspec.decoding.methods.registry import register
from longspec.option import option

if TYPE_CHECKING:
    from torch import Tensor

    from longspec.decoding.round import Models
    from longspec.decoding.slots import Slots
    from longspec.decoding.tree import TokenTree


@register
@dataclass(frozen=True)
class MagicDec(Chain):
    """A chain. The KV of its tokens is written after the prefix, where verification overwrites it.

    With a window as long as the context, drafting computes what the target computes, and all is accepted.
    """

    name = "magicdec"
    summary = "the target drafts with a window of its own cache"
    source = "draft"

    sinks: int = option(4, "entries that drafting sees at the text's beginning", least=0)
    window: int = option(512, "entries that drafting sees at the text's end", least=1)

    def gain(self, acceptance: Mapping[str, Any], run: int | None = None) -> float:
        return chain_gain(chain_rates(acceptance, self.gamma))

    def fit(self, models: Models, draws: bool = False, width: int = 0) -> Self:
        return replace(self, draws=draws)

    def propose(self, models: Models, rows: Slots, sampled: bool) -> TokenTree:
        import torch

        from longspec.decoding.accept import mark
        from longspec.decoding.choose import filtered
        from longspec.decoding.round import choose_rows, forward_chain_or_tree
        from longspec.decoding.tree import TokenTree

        tokens, proposals, seen = [rows.roots], [], rows.sampling.seen
        for depth in range(self.gamma):
            node = TokenTree.chain(tokens[-1][:, None])
            hidden = forward_chain_or_tree(models, rows, node, depth, self.sinks, self.window)
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
    """One token drawn from each row's distribution, int64 [B]."""
    import torch

    from longspec.decoding.rejection import draw_children

    nodes = torch.arange(node, node + 1, device=q.device)
    return draw_children(q[:, None], 1, seeds, positions, nodes)[0][:, 0, 0]
