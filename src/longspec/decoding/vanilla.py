"""Vanilla decoding: the target alone, one token a round."""

from __future__ import annotations

from longspec.decoding.choose import choose
from longspec.decoding.loop import DecodeState


class Vanilla:
    """Nothing is drafted: each round feeds the root and emits the target's next choice."""

    name = "vanilla"
    num_nodes = 1

    def round(self, state: DecodeState) -> list[list[int]]:
        """See `Method.round`."""
        hidden = state.target(state.roots[:, None], state.cache)
        state.cache.advance(state.active())
        logits = state.target.logits(hidden[:, -1])
        positions = state.cache.lengths
        state.roots = choose(logits, state.sampling, state.seeds, positions, state.seen)
        state.mark_seen(state.roots)
        return [[token] for token in state.roots.tolist()]
