"""Prompt lookup: what followed the same few tokens before is proposed again. It needs no draft."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from longspec.decoding.loop import DecodeState
from longspec.decoding.row import Row
from longspec.decoding.tree import TokenTree


class Lookup:
    """A chain of up to `gamma` tokens, copied from behind the newest earlier place that matches best."""

    name = "lookup"

    def __init__(self, gamma: int, max_ngram: int = 3, min_ngram: int = 2) -> None:
        self.gamma = gamma
        self.num_nodes, self.depth = gamma + 1, gamma
        self.tree_shape: tuple[int, ...] | None = (1,) * gamma
        self.device_key: tuple[Hashable, ...] | None = None
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._indices: list[NgramIndex] = []

    def begin(self, state: DecodeState) -> None:
        """Index the prompts."""
        self._indices = [NgramIndex(self._sizes) for _ in state.rows]

    def follow(self, state: DecodeState) -> None:
        """Nothing to do: what the rows said meanwhile is read at the next proposal."""

    def propose(self, state: DecodeState) -> TokenTree:
        """See `Method.propose`; rows without a match are filled up with their root."""
        found = [
            [] if row.finished else index.following(row, self.gamma)
            for row, index in zip(state.rows, self._indices, strict=True)
        ]
        longest = max(map(len, found))
        tokens = [
            [root, *chain, *[root] * (longest - len(chain))]
            for root, chain in zip(state.roots.tolist(), found, strict=True)
        ]
        return TokenTree.chain(torch.tensor(tokens, device=state.roots.device))


class NgramIndex:
    """Where each n-gram of a row's text last ended with something behind it."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def following(self, row: Row, count: int) -> list[int]:
        """The `count` tokens that followed what the row's text now ends with, the longest match first.

        Behind the text's end they begin anew: a loop goes on as a loop.
        """
        self._extend(row)
        for size in self._sizes:
            end = self._ends.get(tuple(self._text[-size:]))
            if end is not None and len(self._text) > size:
                period = len(self._text) - end
                return [self._text[end + place % period] for place in range(count)]
        return []

    def _extend(self, row: Row) -> None:
        """Take in what is new of the row's text; the n-grams at its very end have no follower yet."""
        known = len(self._text)
        self._text += row.prompt[known:] if known < len(row.prompt) else []
        self._text += row.tokens[len(self._text) - len(row.prompt) :]
        for end in range(max(known, 1), len(self._text)):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self._text[end - size : end])] = end
