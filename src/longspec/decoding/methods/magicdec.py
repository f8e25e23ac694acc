"""MagicDec: the target drafts for itself, looking only at the beginning and the end of its own cache."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from longspec.cache import KVCache
from longspec.decoding.accept import mark
from longspec.decoding.choose import choose, filtered
from longspec.decoding.loop import DecodeState
from longspec.decoding.rejection import draw_children
from longspec.decoding.tree import TokenTree


class MagicDec:
    """A chain of `gamma`. The drafted tokens' KV goes behind the prefix, where verification overwrites it.

    With a window as long as the context, the draft is the target, and everything is accepted.
    """

    name = "magicdec"

    def __init__(self, gamma: int, sinks: int, window: int, draws: bool) -> None:
        self.gamma = gamma
        self.num_nodes, self.depth = gamma + 1, gamma
        self.tree_shape: tuple[int, ...] | None = (1,) * gamma
        self._sinks, self._window = sinks, window
        self._draws = draws
        self.device_key: tuple[Hashable, ...] | None = None if draws else ("magicdec", gamma, sinks, window)

    def begin(self, state: DecodeState) -> None:
        """Nothing to prepare: the cache is the target's."""

    def follow(self, state: DecodeState) -> None:
        """Nothing to take in either."""

    def propose(self, state: DecodeState) -> TokenTree:
        """See `Method.propose`."""
        cache = KVCache(state.cache.keys, state.cache.values, state.cache.lengths.clone())
        tokens, proposals, seen = [state.roots], [], state.seen
        for depth in range(self.gamma):
            hidden = state.target(tokens[-1][:, None], cache, sinks=self._sinks, window=self._window)
            cache.advance(1)
            logits = state.target.logits(hidden[:, -1])
            if self._draws:
                q = filtered(logits, state.sampling, seen).softmax(-1)
                proposals.append(q)
                tokens.append(_draw(q, state.seeds, cache.lengths, depth))
            else:
                tokens.append(choose(logits, state.sampling, state.seeds, cache.lengths, seen))
            seen = mark(seen, tokens[-1])
        if not self._draws:
            return TokenTree.chain(torch.stack(tokens, 1))
        proposals.append(torch.zeros_like(proposals[-1]))  # the leaf has no children
        return TokenTree.chain(torch.stack(tokens, 1), torch.stack(proposals, 1))


def _draw(q: Tensor, seeds: Tensor, positions: Tensor, node: int) -> Tensor:
    drawn, _ = draw_children(q[:, None], 1, seeds, positions, torch.tensor([node], device=q.device))
    return drawn[:, 0, 0]
