"""The positions of the tokens in a training batch, where the draft is asked, and what it sees there.

The draft lags behind the target: a query at depth d does not see the target's last d tokens. So each sample
draws one or more lags. Short samples teach long contexts: each draws an offset, which moves all but the first
tokens of a document far away. Both draws depend only on the seed and the sample's number, so any number of
processes draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspec.attention.packed import Pieces
from longspec.data.collate import Batch

# The draft is also asked in gaps up to this length. A query after a longer gap begins a new piece, and that
# piece reads all keys of its document again.
_GAP = 64
# For the progress line, the draft's best tokens are compared with the target's at this many queries.
_PROBES = 256


@dataclass(frozen=True)
class Draws:
    """The limits of what each sample draws at random."""

    max_lag: int
    window: int
    """Of the draft. A smaller offset becomes 0: some tokens would still have the sinks in their window."""
    num_sinks: int = 4
    """How many first tokens of a document keep positions 0, 1, ... when the rest is moved."""
    max_offset: int = 0
    """The largest offset; 0 moves nothing."""
    num_lags: int = 1
    """Lags per sample, spread evenly over the range."""
    lag_decay: float = 1.0
    """How often a lag is drawn, relative to the lag below it."""
    all_lags: bool = False
    """Whether each sample has all lags, 1 to `max_lag`, instead of some that it draws."""

    def lags_and_offset(self, seed: int, sample: int) -> tuple[tuple[int, ...], int]:
        """The draws of one sample, by its number in the run."""
        chance = np.random.default_rng((seed, sample))
        first = int(chance.integers(0, self.max_lag))
        if self.lag_decay < 1:
            shares = self.lag_decay ** np.arange(self.max_lag)
            first = int(np.searchsorted(np.cumsum(shares), chance.random() * shares.sum(), side="right"))
        steps = (number * self.max_lag // self.num_lags for number in range(self.num_lags))
        offset = int(chance.integers(0, self.max_offset + 1))
        lags = tuple((first + step) % self.max_lag + 1 for step in steps)
        if self.all_lags:
            lags = tuple(range(1, self.max_lag + 1))
        return lags, offset if offset >= self.window else 0


@dataclass(frozen=True)
class Level:
    """What the R asked tokens see at one lag, which may differ from row to row of the batch."""

    lags: Tensor
    """int64, [1] if all rows have the same lag, else [R]."""
    source: Tensor
    """[R]: the flat index of the newest target token that each sees."""
    sees: Tensor
    """[R] bool: whether there is such a token in its document."""
    keys: Tensor
    """[S]: the flat indices of the target's keys and values, piece by piece."""
    key_pieces: Pieces
    """The pieces of `keys`; the last query of a piece sees all of its keys, the query before it one less."""
    query_pieces: Pieces
    counts: Tensor
    """[M] bool: which of the layout's queries count at this lag."""
    num_counted: int


@dataclass(frozen=True)
class Layout:
    """A batch on the device of the model. A flat index counts through all rows, B * T.

    The draft is asked only where something is learnt, not in prompts.
    """

    tokens: Tensor
    """[B, T]"""
    positions: Tensor
    """[B, T], for rope."""
    max_position: int
    documents: Pieces
    """The target attends within these pieces."""
    own: Pieces
    """The draft attends to itself within these; sinks of a moved document are out of its window."""
    asked: Tensor
    """[R]: the flat indices of the tokens at which the draft is asked, rising. With several levels, the
    parents of a query are asked too."""
    queries: Tensor
    """[M]: which of the asked ones count, at one level or more."""
    labels: Tensor
    """[M]: the tokens that they should predict, as rows of the draft's head."""
    probes: Tensor
    """[P]: some of the M queries; they count at every level."""
    levels: tuple[Level, ...]


def head_rows(vocab_ids: Tensor | None, vocab_size: int) -> NDArray[np.int64]:
    """The row of the draft's head for each token of the vocabulary; -1 if it has none."""
    if vocab_ids is None:
        return np.arange(vocab_size)
    rows = np.full(vocab_size, -1)
    rows[vocab_ids.cpu().numpy()] = np.arange(len(vocab_ids))
    return rows


def lay_out(
    batch: Batch,
    lags: Sequence[Sequence[int]],
    offsets: Sequence[int],
    num_sinks: int,
    rows: NDArray[np.int64],
    device: torch.device,
) -> Layout:
    """Lay out a batch whose rows drew these lags, one of each row at every level, and these offsets.

    `rows` come from `head_rows`. Several levels are lags that are learnt together: 1, 2, ...
    """
    starts, learn = batch.starts.numpy(), batch.learn.numpy()
    B, T = starts.shape
    place = np.arange(T)
    since = place - starts
    offset = np.asarray(offsets)[:, None]
    positions = since + np.where(since >= num_sinks, offset, 0)
    # The query before a token predicts it. Leave out tokens that the draft cannot propose.
    labels = rows[batch.tokens.numpy()]
    learnt = np.zeros((B, T), bool)
    learnt[:, :-1] = learn[:, 1:] & (starts[:, 1:] == starts[:, :-1]) & (labels[:, 1:] >= 0)
    # Also leave out queries that decoding can never make, because fewer tokens of their document come before
    # them than their lag.
    lag_of = np.asarray(lags)[:, :, None]
    counted = learnt & (since >= lag_of)
    counts = counted.any(0)
    asked = _asked(counts, starts, len(lags) - 1)
    if not asked.any():
        asked[0, 0] = True  # it does not count, but attention needs a query
    flat = np.flatnonzero(asked)
    spans = _spans(flat, starts)
    queries = np.flatnonzero(counts)
    by_level = counted.reshape(len(lags), -1)[:, queries]
    probes = np.flatnonzero(by_level.all(0))
    some = np.linspace(0, max(len(probes) - 1, 0), min(len(probes), _PROBES)).astype(np.int64)

    def to_device(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    def pieces(begins: NDArray[np.bool_]) -> Pieces:
        return Pieces(tuple(np.flatnonzero(begins).tolist()), B * T, T, device)

    def level(lag: NDArray[np.int64], counts: NDArray[np.bool_]) -> Level:
        of_asked = np.broadcast_to(lag, (B, T)).reshape(-1)[flat]
        query_ends, keys, key_ends = _pieces_of(spans, flat, lag[:, 0], T)
        return Level(
            lags=to_device(np.array(lag[0] if (lag == lag[0]).all() else of_asked)),
            source=to_device(np.maximum(flat - of_asked, 0)),
            sees=to_device(since.reshape(-1)[flat] >= of_asked),
            keys=to_device(keys),
            key_pieces=Pieces(tuple(key_ends[:-1]), key_ends[-1], T, device),
            query_pieces=Pieces(tuple(query_ends[:-1]), query_ends[-1], T, device),
            counts=to_device(counts),
            num_counted=int(counts.sum()),
        )

    return Layout(
        tokens=batch.tokens.to(device, non_blocking=True),
        positions=to_device(positions),
        max_position=int(positions.max()),
        documents=pieces(since == 0),
        own=pieces((since == 0) | ((since == num_sinks) & (offset > 0))),
        asked=to_device(flat),
        queries=to_device(np.searchsorted(flat, queries)),
        labels=to_device(labels.reshape(-1)[queries + 1]),
        probes=to_device(probes[some]),
        levels=tuple(level(*one) for one in zip(lag_of, by_level, strict=True)),
    )


def _asked(counts: NDArray[np.bool_], starts: NDArray[np.int64], num_parents: int) -> NDArray[np.bool_]:
    """Where the draft is asked [B, T]: at queries that count, at the `num_parents` tokens before them, and in
    short gaps between them."""
    T, far = counts.shape[1], 2**40
    place = np.arange(T)
    following = np.minimum.accumulate(np.where(counts, place, far)[:, ::-1], 1)[:, ::-1]
    previous = np.maximum.accumulate(np.where(counts, place, -far), 1)
    # The next query that counts must be of the same document, and so must the one before.
    same = np.take_along_axis(starts, np.minimum(following, T - 1), 1) == starts
    asked = (following - place <= num_parents) & same
    return asked | ((following - previous <= _GAP) & same & (previous >= starts))


_Span = tuple[int, int, int]
"""Neighbouring asked tokens of one document: where they begin and end in `asked`, and the flat index of the
document's first token."""


def _spans(flat: NDArray[np.int64], starts: NDArray[np.int64]) -> list[_Span]:
    B, T = starts.shape
    first = (starts + T * np.arange(B)[:, None]).reshape(-1)[flat]
    breaks = np.flatnonzero((np.diff(flat) != 1) | (np.diff(first) != 0)) + 1
    return [(begin, end, int(first[begin])) for begin, end in pairwise([0, *breaks.tolist(), len(flat)])]


def _pieces_of(
    spans: Sequence[_Span], flat: NDArray[np.int64], lag_of_row: NDArray[np.int64], row_length: int
) -> tuple[list[int], NDArray[np.int64], list[int]]:
    """The pieces of cross-attention at one lag: the bounds of the queries, the keys, and their bounds."""
    query_bounds, keys, key_bounds = [0], [np.zeros(0, np.int64)], [0]

    def add(end: int, first_key: int, last_key: int) -> None:
        query_bounds.append(end)
        keys.append(np.arange(first_key, last_key + 1))
        key_bounds.append(key_bounds[-1] + len(keys[-1]))

    for begin, end, first in spans:
        lag = int(lag_of_row[first // row_length])
        # The first queries of a document see no key. They get their own, because a piece needs keys, and what
        # they find there does not count.
        blind = min(max(first + lag - int(flat[begin]), 0), end - begin)
        if blind:
            add(begin + blind, int(flat[begin]), int(flat[begin]) + blind - 1)
        if begin + blind < end:
            add(end, first, int(flat[end - 1]) - lag)
    return query_bounds, np.concatenate(keys), key_bounds
