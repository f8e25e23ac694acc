"""Keeping the KV of the last texts, so that what a new prompt repeats is not computed again."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import torch

from longspec.cache import KVCache
from longspec.decoding.row import Row
from longspec.models.target import Transformer

# Buffers grow in steps, so that a conversation does not reallocate at every turn.
_STEP = 1024


@dataclass
class PrefixStore:
    """One cache between requests, with the tokens its rows hold.

    A request takes the cache out and puts it back; one that comes meanwhile gets a cache of its own.
    """

    _cache: KVCache | None = None
    _tokens: list[list[int]] = field(default_factory=list)

    def take(self, target: Transformer, prompts: list[list[int]], capacity: int, limit: int) -> KVCache:
        """A cache of at least `capacity` entries per row that holds all it can of the prompts' beginnings.

        `limit` is the most entries worth allocating.
        """
        cache, held = self._cache, self._tokens
        self.clear()
        if cache is None or cache.num_rows != len(prompts):
            return target.new_cache(len(prompts), _rounded(capacity, limit))
        # At least the last prompt token is left to compute: its logits choose the first new token.
        common = [min(_common_prefix(old, new), len(new) - 1) for old, new in zip(held, prompts, strict=True)]
        cache.truncate(torch.tensor(common))
        if cache.capacity >= capacity:
            return cache
        if not any(common):
            del cache  # the old buffers go before the new ones come
            return target.new_cache(len(prompts), _rounded(capacity, limit))
        return cache.grown(_rounded(capacity, limit))

    def put_back(self, cache: KVCache, rows: list[Row]) -> None:
        """Keep a cache that `take` gave, with what its rows have said."""
        # Rows that stopped inside a round have more in the cache than they kept, and the newest token's KV
        # may not be there at all: hold what is both said and cached.
        texts = [row.prompt + row.tokens for row in rows]
        cache.truncate(torch.tensor([len(text) for text in texts]))
        lengths = cache.lengths.tolist()
        self._cache = cache
        self._tokens = [text[:length] for text, length in zip(texts, lengths, strict=True)]

    def clear(self) -> None:
        """Let the memory go."""
        self._cache, self._tokens = None, []


def _common_prefix(one: list[int], two: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def _rounded(capacity: int, limit: int) -> int:
    return max(capacity, min(limit, -(-capacity // _STEP) * _STEP))
