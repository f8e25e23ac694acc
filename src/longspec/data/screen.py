"""Find text that is not worth learning from: loops, repetitions and near-duplicates."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

# A loop is an end of a text that repeats with a period of at most `_LONGEST_PERIOD` tokens, for at least two
# more periods and `_LEAST_REPEATED` tokens. A table or a short refrain is not a loop.
_LONGEST_PERIOD = 128
_LEAST_REPEATED = 24
_COMPARED_FIRST = 4
# A text that is still being written may leave a loop again: it must have repeated more.
_LEAST_REPEATED_SO_FAR = 32
# A text is repetitive if more than this share of its runs of `_RUN` tokens occurred in it before.
_RUN = 4
_MOST_REPEATS = 0.5
_SHORT = 64
# Near-duplicates by MinHash: shingles of 3 tokens, 64 minima in 8 bands of 8. Two texts that share 90% of
# their shingles are found with 99% probability, two that share half of them with 3%.
_SHINGLE = 3
_BANDS = 8
_MINIMA = 64
_REMEMBERED = 2**18
# Odd, so that a product with it loses no bit.
_BASE = np.uint64(0x9E3779B97F4A7C15)


def loop_start(tokens: NDArray[np.int64]) -> int | None:
    """Where a text begins to repeat itself up to its end; None if it does not."""
    found = _find_loop(tokens, _LEAST_REPEATED)
    return None if found is None else found[0]


def second_repetition(tokens: NDArray[np.int64]) -> int | None:
    """Where a text that repeats itself up to its end does so for the second time; None if it does not."""
    found = _find_loop(tokens, _LEAST_REPEATED)
    return None if found is None else sum(found)


def is_looping(tokens: NDArray[np.int64]) -> bool:
    """Whether a text that is being written is in a loop that it will hardly leave."""
    return _find_loop(tokens, _LEAST_REPEATED_SO_FAR) is not None


def _find_loop(tokens: NDArray[np.int64], least_repeated: int) -> tuple[int, int] | None:
    """The start and the period of a loop that goes on to the end of the text; None if there is none."""
    size = len(tokens)
    if size <= least_repeated:
        return None
    most = min(_LONGEST_PERIOD, size // 3)
    # Only periods after which the last few tokens come again are looked at, because that takes little time.
    ending = tokens[::-1][: most + _COMPARED_FIRST]
    again = [ending[at + 1 : at + 1 + most] == ending[at] for at in range(_COMPARED_FIRST)]
    periods: list[int] = (np.flatnonzero(np.logical_and.reduce(again)) + 1).tolist()
    for period in periods:
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        start = period + (int(differs[-1]) + 1 if len(differs) else 0)
        if size - start >= max(2 * period, least_repeated):
            return start, period
    return None


def is_repetitive(tokens: NDArray[np.int64]) -> bool:
    """Whether most runs of tokens of a text occurred in it before, even without an exact loop."""
    runs = len(tokens) - _RUN + 1
    if len(tokens) < _SHORT:
        return False
    different = len(np.unique(_hashed_runs(tokens, _RUN)))
    return bool(1 - different / runs > _MOST_REPEATS)


def signature(tokens: NDArray[np.int64], kind: int) -> NDArray[np.uint64]:
    """Keys [8] of a text. Near-duplicates of the same kind share at least one key."""
    shingles = _hashed_runs(tokens, min(_SHINGLE, len(tokens)))
    minima = ((shingles * _factors()[:, None]) >> np.uint64(16)).min(1)
    bands = (minima * _factors()).reshape(_BANDS, -1).sum(1)
    return _mixed(bands + np.arange(_BANDS, dtype=np.uint64) + np.uint64(_BANDS * kind))


class SeenTexts:
    """Remembers the last 262,144 texts that were kept; the bound limits memory."""

    def __init__(self) -> None:
        self._keys: dict[int, None] = {}

    def add(self, keys: NDArray[np.uint64]) -> bool:
        """Remember a text by its `signature`. If a similar one is known, return False and change nothing."""
        numbers = keys.tolist()
        if any(key in self._keys for key in numbers):
            return False
        self.remember(numbers)
        return True

    def remember(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._keys[key] = None
            if len(self._keys) > _REMEMBERED * _BANDS:
                del self._keys[next(iter(self._keys))]


@cache
def _factors() -> NDArray[np.uint64]:
    return _mixed(np.arange(1, _MINIMA + 1, dtype=np.uint64)) | np.uint64(1)


def _hashed_runs(tokens: NDArray[np.int64], length: int) -> NDArray[np.uint64]:
    """A hash of each run of `length` tokens."""
    numbers = tokens.astype(np.uint64) + np.uint64(1)
    hashed = np.zeros(len(tokens) - length + 1, np.uint64)
    for place in range(length):
        hashed = hashed * _BASE + numbers[place : place + len(hashed)]
    return _mixed(hashed)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64; its products wrap around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
