"""Text that must stay out of training, because something is measured on it.

Texts are compared in lower case and without white space, so that line ends and indentation hide no copy. A
text counts as a copy where it shares `WINDOW` such characters in a row with a held-out text (about 80 printed
characters), or if the whole text is one of the held-out texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspec.data.records import read_records

WINDOW = 60
# A table of bits rules out most windows quickly; only the rest are looked up.
_TABLE_BITS = 24


class HeldOut:
    """Knows every window of the held-out texts by its hash."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        whole: set[str] = set()
        hashes: list[NDArray[np.uint64]] = []
        for text in texts:
            kept, _ = _compact(text)
            whole.add(_key(kept))
            hashes.append(_windows(kept))
        self._whole = whole
        self._hashes = np.unique(np.concatenate(hashes)) if hashes else np.zeros(0, np.uint64)
        self._table = np.zeros(1 << _TABLE_BITS, bool)
        self._table[_place(self._hashes)] = True

    @classmethod
    def read(cls, paths: Sequence[str]) -> HeldOut:
        """All texts in the records of these files, whatever their fields are called."""
        return cls(text for _, record in read_records(paths) for text in _texts(record))

    def allows(self, text: str) -> bool:
        """Whether the text has no held-out part."""
        kept, _ = _compact(text)
        return _key(kept) not in self._whole and not len(self._hits(kept))

    def cut(self, text: str) -> list[str]:
        """The text without its held-out parts: the pieces between them."""
        kept, places = _compact(text)
        hits = self._hits(kept)
        pieces, begin = [], 0
        # Windows that overlap or touch are one part.
        breaks = np.flatnonzero(np.diff(hits) > WINDOW) + 1
        for run in np.split(hits, breaks) if len(hits) else []:
            pieces.append(text[begin : int(places[run[0]])])
            begin = int(places[run[-1] + WINDOW - 1]) + 1
        return [piece for piece in (*pieces, text[begin:]) if piece.strip()]

    def _hits(self, kept: NDArray[np.uint32]) -> NDArray[np.int64]:
        """The places at which held-out windows begin."""
        hashes = _windows(kept)
        near = np.flatnonzero(self._table[_place(hashes)])
        if not len(near):
            return near
        found = np.searchsorted(self._hashes, hashes[near]).clip(max=len(self._hashes) - 1)
        return near[self._hashes[found] == hashes[near]]


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _compact(text: str) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The characters that count, and the place of each in the text."""
    raw = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    # Only ASCII becomes lower case, because elsewhere that may change the number of characters.
    lowered = np.where((raw >= 65) & (raw <= 90), raw + 32, raw)
    places = np.flatnonzero((raw > 32) & (raw != 0xA0))
    return lowered[places], places


def _key(kept: NDArray[np.uint32]) -> str:
    return kept.tobytes().decode("utf-32-le", "surrogatepass")


def _windows(kept: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """A hash of each run of `WINDOW` characters, built from the hashes of shorter runs."""
    if len(kept) < WINDOW:
        return np.zeros(0, np.uint64)
    spans = {1: (kept.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)}
    span = 1
    while 2 * span <= WINDOW:
        spans[2 * span] = _joined(spans[span], spans[span], span)
        span *= 2
    hashed, covered = spans[span], span
    for size in (size for size in sorted(spans, reverse=True) if size < span):
        if covered + size <= WINDOW:
            hashed, covered = _joined(hashed, spans[size], covered), covered + size
    return hashed


def _joined(first: NDArray[np.uint64], second: NDArray[np.uint64], distance: int) -> NDArray[np.uint64]:
    """The hash of two neighbours; products wrap around."""
    number = min(len(first), len(second) - distance)
    joined = first[:number] * np.uint64(0xD6E8FEB86659FD93) + second[distance : distance + number]
    return joined ^ (joined >> np.uint64(29))


def _place(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (hashes * np.uint64(0x9FB21C651E98DF25)) >> np.uint64(64 - _TABLE_BITS)
