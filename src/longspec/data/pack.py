"""Pack documents into sequences of one length: the packing policies.

A shard holds consecutive documents of the input. `Shelf` collects as many as fill a shard, so that work can
resume at the end of any shard.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspec.data.shards import Packed, Role


@dataclass(frozen=True)
class Document:
    """A document, or a part of one, as tokens."""

    tokens: NDArray[np.uint32]
    roles: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, span: slice) -> Document:
        return Document(self.tokens[span], self.roles[span])


@dataclass(frozen=True)
class Packing:
    """A way to pack."""

    pack: Callable[[Sequence[Document], int, int], list[Packed]]
    """Takes documents, the sequence length and the token id of padding."""
    splits: bool
    """Whether a document may continue in the next shard."""
    shares: bool
    """Whether documents share a sequence; otherwise each begins a new one."""


def pack_stream(documents: Sequence[Document], seq_length: int, pad_id: int) -> list[Packed]:
    """Join the documents and cut where a sequence ends. Only the last sequence is padded."""
    if not documents:
        return []
    starts = np.cumsum([0, *(len(document) for document in documents)])
    tokens = np.concatenate([document.tokens for document in documents])
    roles = np.concatenate([document.roles for document in documents])
    sequences = []
    for first in range(0, len(tokens), seq_length):
        last = min(first + seq_length, len(tokens))
        inside = starts[np.searchsorted(starts, first, "right") : np.searchsorted(starts, last, "left")]
        piece = Document(tokens[first:last], roles[first:last])
        sequences.append(_padded(piece, [0, *(inside - first)], seq_length, pad_id))
    return sequences


def pack_whole(documents: Sequence[Document], seq_length: int, pad_id: int) -> list[Packed]:
    """Cut a document only if it is longer than a sequence (best fit, longest first).

    Sequences, and documents in a sequence, are in the order of the input.
    """
    pieces = _pieces(documents, seq_length)
    rooms: list[tuple[int, int]] = []  # (tokens left, sequence), ascending
    contents: list[list[int]] = []
    for index in sorted(range(len(pieces)), key=lambda index: -len(pieces[index])):
        length = len(pieces[index])
        found = bisect.bisect_left(rooms, (length, 0))
        if found == len(rooms):
            room, sequence = seq_length, len(contents)
            contents.append([])
        else:
            room, sequence = rooms.pop(found)
        contents[sequence].append(index)
        if room > length:
            bisect.insort(rooms, (room - length, sequence))
    return [
        _joined([pieces[index] for index in sorted(inside)], seq_length, pad_id)
        for inside in sorted(contents, key=min)
    ]


def pack_single(documents: Sequence[Document], seq_length: int, pad_id: int) -> list[Packed]:
    """One document per sequence; a longer one continues in the next sequences. Each end is padded."""
    return [_joined([piece], seq_length, pad_id) for piece in _pieces(documents, seq_length)]


POLICIES = {
    "stream": Packing(pack_stream, splits=True, shares=True),
    "whole": Packing(pack_whole, splits=False, shares=True),
    "single": Packing(pack_single, splits=True, shares=False),
}


class Shelf:
    """The documents of the shard that is being filled."""

    def __init__(self, policy: Packing, seq_length: int, num_sequences: int, pad_id: int) -> None:
        self._policy, self._seq_length, self._pad_id = policy, seq_length, pad_id
        self._capacity = num_sequences * seq_length
        self._documents: list[Document] = []
        self._used = 0

    def put(self, document: Document) -> int:
        """Take as much of the document as there is room for; returns the number of tokens."""
        taken = min(len(document), self._capacity - self._used) if self._policy.splits else len(document)
        self._documents.append(document[:taken])
        step = 1 if self._policy.shares else self._seq_length
        self._used += -(-taken // step) * step
        return taken

    @property
    def is_full(self) -> bool:
        return self._used >= self._capacity

    def take(self) -> list[Packed]:
        """Pack all documents, and empty the shelf."""
        sequences = self._policy.pack(self._documents, self._seq_length, self._pad_id)
        self._documents, self._used = [], 0
        return sequences


def _pieces(documents: Sequence[Document], seq_length: int) -> list[Document]:
    return [
        document[first : first + seq_length]
        for document in documents
        for first in range(0, len(document), seq_length)
    ]


def _joined(pieces: Sequence[Document], seq_length: int, pad_id: int) -> Packed:
    starts = np.cumsum([0, *(len(piece) for piece in pieces[:-1])])
    tokens = np.concatenate([piece.tokens for piece in pieces])
    roles = np.concatenate([piece.roles for piece in pieces])
    return _padded(Document(tokens, roles), list(starts), seq_length, pad_id)


def _padded(content: Document, starts: list[int], seq_length: int, pad_id: int) -> Packed:
    """The sequence with this content; the padding at its end is a document of its own."""
    missing = seq_length - len(content)
    tokens = np.pad(content.tokens.astype(np.int64), (0, missing), constant_values=pad_id)
    roles = np.pad(content.roles, (0, missing), constant_values=Role.PAD)
    return Packed(tokens, roles, np.array(starts + [len(content)] * (missing > 0), np.int32))
