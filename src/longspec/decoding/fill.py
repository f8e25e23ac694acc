"""Short prompts by replays: a captured pass takes a few tokens at a time into the cache.

The host takes longer to launch a pass over a prompt than a GPU takes to do it, unless the prompt is long or
the target large: then it is better read at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspec.cache import KVCache
from longspec.decoding.graph import capture
from longspec.decoding.loop import PREFILL_CHUNK, DecodeState
from longspec.models.layers import Block
from longspec.models.target import Transformer

# Tokens of a row that one replay takes in: as many as our own products are for.
SIZE = 64
# What a layer takes, in microseconds: the launches of a fast host (1,100 where the others were measured), a
# replay's kernels, a MB of weights; and how much more of the latter each further row takes.
_LAUNCHED, _REPLAYED, _PER_MB, _MORE = 600.0, 25.0, 0.29, 0.3


class Filler:
    """Brings what a cache lacks of its rows' prompts into it."""

    def __init__(self, target: Transformer, cache: KVCache) -> None:
        self.cache, self._target = cache, target
        B, device = cache.num_rows, target.device
        self._tokens = torch.zeros(B, SIZE, dtype=torch.int64, device=device)
        self._counts = torch.zeros(B, dtype=torch.int64, device=device)
        self._feature = torch.zeros(B, target.config.hidden_size, dtype=target.dtype, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._table: Tensor | None = None

    def fill(self, state: DecodeState) -> None:
        """Take in all that is lacking; the state gets the hidden state of each prompt's last token."""
        lacking = _lacking(state)
        assert all(lacking), "the last prompt token must be computed, for its logits"
        if self._graph is None and self._target.device.type == "cuda":
            self._counts.zero_()
            self._graph = capture(self._take, self._target.device)
            # The graph reads this very table, and the target takes another one when a longer text comes.
            self._table = self._target.rope.table
        pieces = [
            [tokens[first : first + SIZE] for tokens in lacking]
            for first in range(0, max(map(len, lacking)), SIZE)
        ]
        padded = torch.tensor([[one + [0] * (SIZE - len(one)) for one in piece] for piece in pieces])
        counts = torch.tensor([[len(one) for one in piece] for piece in pieces])
        for tokens, count in zip(padded.to(self._tokens.device), counts.to(self._counts.device), strict=True):
            self._tokens.copy_(tokens)
            self._counts.copy_(count)
            if self._graph is None:
                self._take()
            else:
                self._graph.replay()
        state.feature = self._feature.clone()
        state.num_prefilled += sum(map(len, lacking))

    def _take(self) -> None:
        """Each row's next tokens, as many as it has; what is behind them is padding, and counts for nothing.
        A row without any stands still."""
        hidden = self._target(self._tokens, self.cache)
        last = (self._counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[2])
        taken = hidden.gather(1, last)[:, 0]
        self._feature.copy_(torch.where(self._counts[:, None] > 0, taken, self._feature))
        self.cache.advance(self._counts)


def pays(state: DecodeState) -> bool:
    """Whether replays are the faster way to fill this state's cache, and have room for their padding."""
    num_rows = len(state.rows)
    if num_rows * SIZE > PREFILL_CHUNK:  # what bounds the memory of a pass
        return False
    if any(len(row.prompt) + SIZE > state.cache.capacity for row in state.rows):
        return False
    block = state.target.blocks[0]
    assert isinstance(block, Block)
    megabytes = sum(weight.numel() * weight.itemsize for weight in block.parameters()) / 1e6
    # Rows beyond the first are computed, padding and all, by weights that are there already.
    replay = _REPLAYED + _PER_MB * megabytes * (1 + _MORE * (num_rows - 1))
    longest = max(len(tokens) for tokens in _lacking(state))
    # Replays take all rows at a time; otherwise each row is launched by itself.
    return -(-longest // SIZE) * replay < _LAUNCHED * num_rows


def _lacking(state: DecodeState) -> list[list[int]]:
    lengths = state.cache.lengths.tolist()
    return [row.prompt[length:] for row, length in zip(state.rows, lengths, strict=True)]
