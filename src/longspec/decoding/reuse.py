"""Keeping the KV of the last texts, so that what a new prompt repeats is not computed again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from longspec.cache import KVCache
from longspec.decoding.device import RoundStore
from longspec.decoding.row import Row
from longspec.errors import UserError
from longspec.models.placement import free_memory, gigabytes, memory_explained
from longspec.models.target import Transformer

# Buffers grow in steps, so that a conversation does not reallocate at every turn.
_STEP = 1024
# Left free beside the cache: the activations of a prefill chunk, and the logits.
_WORKING = 256 * 2**20
WAY_OUT = (
    "shorten the prompt, lower max_new_tokens, give fewer prompts at once, or load the target in a smaller "
    "dtype or on another device"
)


@dataclass(frozen=True)
class _Held:
    """A cache that waits for the next request, with the tokens its rows hold."""

    cache: KVCache
    texts: list[list[int]]

    @property
    def num_bytes(self) -> int:
        """What comes free without it: on a CPU, pages never written to were never taken."""
        if self.cache.keys.device.type != "cpu":
            return self.cache.num_bytes
        return self.cache.num_bytes // self.cache.capacity * max(map(len, self.texts))


@dataclass
class PrefixStore:
    """One cache between requests, with the tokens its rows hold.

    A request takes the cache out and puts it back; one that comes meanwhile gets a cache of its own. Threads
    may share a store.
    """

    rounds: RoundStore = field(default_factory=RoundStore)
    """Graphs over the cache; they go when it does."""
    _held: _Held | None = None
    # Reentrant: a stream that nobody wants any more may be collected, and put back, at any moment.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def take(
        self, target: Transformer, prompts: list[list[int]], capacity: int, limit: int, slack: int = 0
    ) -> KVCache:
        """A cache of at least `capacity` entries per row that holds all it can of the prompts' beginnings.

        `limit` is the most entries worth allocating; `slack` of them are room for a tree and hold no text.
        What does not fit in memory is refused before anything is allocated or given up.
        """
        per_entry = target.config.kv_bytes_per_token(target.dtype.itemsize) * len(prompts)
        with self._lock:
            held = self._held
            old = held.cache if held is not None and held.cache.num_rows == len(prompts) else None
            room = _room(target, per_entry, held)
            if room < capacity and (old is None or old.capacity < capacity):
                raise UserError(
                    f"a KV cache of {_texts(len(prompts), capacity - slack)} takes "
                    f"{gigabytes(capacity * per_entry)}, but {target.device} has room for "
                    f"{max(0, room - slack)} tokens{' each' if len(prompts) > 1 else ''}; {WAY_OUT}"
                )
            self._held = None
        common = [0]
        if held is not None and old is not None:
            # At least the last prompt token is left to compute: its logits choose the first new token.
            pairs = zip(held.texts, prompts, strict=True)
            common = [min(_common_prefix(text, prompt), len(prompt) - 1) for text, prompt in pairs]
            old.truncate(torch.tensor(common))
            if old.capacity >= capacity:
                return old
        held = None
        self.rounds.clear()
        with memory_explained(f"a KV cache of {_texts(len(prompts), capacity - slack)}", WAY_OUT):
            # Both are there while the old one is copied into the new one; where there is no room for that,
            # the old one goes first and the prompt is computed anew.
            if old is not None and any(common) and (beside := _room(target, per_entry)) >= capacity:
                return old.grown(_rounded(capacity, limit, beside))
            old = None
            return target.new_cache(len(prompts), _rounded(capacity, limit, room))

    def put_back(self, cache: KVCache, rows: list[Row]) -> None:
        """Keep a cache that `take` gave, with what its rows have said, unless a newer one is there."""
        # Rows that stopped inside a round have more in the cache than they kept, and the newest token's KV
        # may not be there at all: hold what is both said and cached.
        texts = [row.prompt + row.tokens for row in rows]
        cache.truncate(torch.tensor([len(text) for text in texts]))
        lengths = cache.lengths.tolist()
        held = _Held(cache, [text[:length] for text, length in zip(texts, lengths, strict=True)])
        with self._lock:
            # What is there came from a request that began while this cache was out: it is the newer one.
            if self._held is None:
                self._held = held

    def forget(self) -> None:
        """Keep the memory and the graphs over it, but nothing of the texts."""
        with self._lock:
            if self._held is not None:
                self._held = _Held(self._held.cache, [[] for _ in self._held.texts])

    def clear(self) -> None:
        """Let the memory go."""
        with self._lock:
            self._held = None
            self.rounds.clear()


def _common_prefix(one: list[int], two: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def _texts(num_rows: int, num_tokens: int) -> str:
    return f"{num_tokens} tokens" if num_rows == 1 else f"{num_rows} times {num_tokens} tokens"


def _rounded(capacity: int, *limits: int) -> int:
    return max(capacity, min(*limits, -(-capacity // _STEP) * _STEP))


def _room(target: Transformer, bytes_per_entry: int, held: _Held | None = None) -> int:
    """Entries that a new cache can have, once `held` is gone."""
    free = free_memory(target.device) + (held.num_bytes if held is not None else 0)
    return max(0, free - _WORKING) // bytes_per_entry
