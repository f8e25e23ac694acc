"""Where the tokens of a training batch stand and what each of them may see.

Drafting lags behind the target: a query at depth d sees nothing of the target's last d tokens. Each sample
draws a lag, or a few. Short samples teach long contexts: each draws an offset that moves all but a document's
first tokens far away. Both draws are pure functions of the seed and the sample's number, so that any
number of processes draws the same.
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
    """What is left to chance, and within which limits."""

    max_lag: int
    window: int
    """The draft's: an offset below it is taken as none, for then sinks and text would half see each other."""
    num_sinks: int = 4
    """Tokens at the head of a document that keep positions 0, 1, ... when the rest is moved."""
    max_offset: int = 0
    """The largest offset; 0 leaves every position as it is."""
    num_lags: int = 1
    """Of each sample, spread evenly over the range."""
    lag_decay: float = 1.0
    """How often a lag is drawn, as a share of how often the one below it is."""

    def lags_and_offset(self, seed: int, sample: int) -> tuple[tuple[int, ...], int]:
        """Those of one sample, by its number in the run."""
        chance = np.random.default_rng((seed, sample))
        first = int(chance.integers(0, self.max_lag))
        if self.lag_decay < 1:
            shares = self.lag_decay ** np.arange(self.max_lag)
            first = int(np.searchsorted(np.cumsum(shares), chance.random() * shares.sum(), side="right"))
        steps = (number * self.max_lag // self.num_lags for number in range(self.num_lags))
        offset = int(chance.integers(0, self.max_offset + 1))
        lags = tuple((first + step) % self.max_lag + 1 for step in steps)
        return lags, offset if offset >= self.window else 0


@dataclass(frozen=True)
class Layout:
    """A batch with its places, on the device of the model. Flat places count through the rows, B * T."""

    tokens: Tensor
    """[B, T]"""
    positions: Tensor
    """[B, T], what rope sees."""
    max_position: int
    documents: Pieces
    """Within which the target attends."""
    own: Pieces
    """Within which the draft attends to itself: sinks that were left behind are out of its window."""
    lagged: Pieces
    """Within which a query attends to the target's KV shifted by the lag."""
    source: Tensor
    """[B, T]: the place in the row of the newest target token that a query sees."""
    sees: Tensor
    """[B, T] bool: whether there is such a token in the query's document."""
    queries: Tensor
    """[M]: the flat places of the queries that count."""
    labels: Tensor
    """[M]: the tokens they should predict, as rows of the head that the draft uses."""
    lags: Tensor
    """[B]: how far each row's queries lag behind the target."""


def head_rows(vocab_ids: Tensor | None, vocab_size: int) -> NDArray[np.int64]:
    """For each token of the vocabulary its row of the draft's head, -1 where it has none."""
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
    """Place a batch whose rows drew these lags and offsets; `rows` are those of `head_rows`."""
    starts, learn = batch.starts.numpy(), batch.learn.numpy()
    B, T = starts.shape
    place = np.arange(T)
    since = place - starts
    lag = np.asarray(lags)[:, None]
    offset = np.asarray(offsets)[:, None]
    positions = since + np.where(since >= num_sinks, offset, 0)
    sees = since >= lag
    # The query before a token predicts it. It is left out where decoding could never ask it: with
    # fewer tokens of its document before it than it lags behind.
    # Tokens that the draft cannot propose are left out too.
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
