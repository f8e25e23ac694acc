"""The positions of the tokens in a training batch, and what each of them may see.

The draft lags behind the target: a query at depth d does not see the target's last d tokens. So each sample
draws one or more lags. Short samples teach long contexts: each draws an offset, which moves all but the first
tokens of a document far away. Both draws depend only on the seed and the sample's number, so any number of
processes draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspec.attention.packed import Pieces
from longspec.data.collate import Batch


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
class Layout:
    """A batch with its positions, on the device of the model. A flat index counts through all rows, B * T."""

    tokens: Tensor
    """[B, T]"""
    positions: Tensor
    """[B, T], for rope."""
    max_position: int
    documents: Pieces
    """The target attends within these pieces."""
    own: Pieces
    """The draft attends to itself within these; sinks of a moved document are out of its window."""
    lagged: Pieces
    """The draft attends to the target's KV, shifted by the lag, within these."""
    source: Tensor
    """[B, T]: the index in the row of the newest target token that a query sees."""
    sees: Tensor
    """[B, T] bool: whether there is such a token in the query's document."""
    queries: Tensor
    """[M]: the flat indices of the queries that count."""
    labels: Tensor
    """[M]: the tokens that they should predict, as rows of the draft's head."""
    lags: Tensor
    """[B]: the lag of each row."""

    def shift(self, values: Tensor) -> Tensor:
        """For each query, what `values` [B, T, ...] has at the newest target token that it sees."""
        rows = torch.arange(len(self.source), device=self.source.device)[:, None]
        return values[rows, self.source]


def head_rows(vocab_ids: Tensor | None, vocab_size: int) -> NDArray[np.int64]:
    """The row of the draft's head for each token of the vocabulary; -1 if it has none."""
    if vocab_ids is None:
        return np.arange(vocab_size)
    rows = np.full(vocab_size, -1)
    rows[vocab_ids.cpu().numpy()] = np.arange(len(vocab_ids))
    return rows


def lay_out(
    batch: Batch,
    lags: Sequence[int],
    offsets: Sequence[int],
    num_sinks: int,
    rows: NDArray[np.int64],
    device: torch.device,
) -> Layout:
    """Lay out a batch whose rows drew these lags and offsets; `rows` come from `head_rows`."""
    starts, learn = batch.starts.numpy(), batch.learn.numpy()
    B, T = starts.shape
    place = np.arange(T)
    since = place - starts
    lag = np.asarray(lags)[:, None]
    offset = np.asarray(offsets)[:, None]
    positions = since + np.where(since >= num_sinks, offset, 0)
    sees = since >= lag
    # The query before a token predicts it. Leave out queries that decoding can never make, because fewer
    # tokens of their document come before them than their lag, and tokens that the draft cannot propose.
    labels = rows[batch.tokens.numpy()]
    counts = np.zeros((B, T), bool)
    counts[:, :-1] = learn[:, 1:] & sees[:, :-1] & (starts[:, 1:] == starts[:, :-1]) & (labels[:, 1:] >= 0)
    queries = np.flatnonzero(counts)
    first = since == 0

    def to_device(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    def pieces(begins: NDArray[np.bool_]) -> Pieces:
        return Pieces(tuple(np.flatnonzero(begins).tolist()), B * T, T, device)

    return Layout(
        batch.tokens.to(device, non_blocking=True),
        to_device(positions),
        int(positions.max()),
        pieces(first),
        pieces(first | ((since == num_sinks) & (offset > 0))),
        pieces(first | (since == lag)),
        to_device(np.maximum(place - lag, 0)),
        to_device(sees),
        to_device(queries),
        to_device(labels.reshape(-1)[queries + 1]),
        to_device(np.asarray(lags)),
    )
