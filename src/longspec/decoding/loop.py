"""The round loop: propose, verify, accept, commit, for all rows at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longspec.cache import KVCache
from longspec.decoding.choose import Sampling, choose
from longspec.decoding.row import Row
from longspec.models.target import Transformer

PREFILL_CHUNK = 2048


@dataclass
class DecodeState:
    """What the rounds of one decode share. B rows; a finished row stands still."""

    target: Transformer
    cache: KVCache
    rows: list[Row]
    sampling: Sampling
    seeds: Tensor
    """int64 [B]"""
    seen: Tensor | None
    """Tokens each row has had, bool [B, V]; kept only for the repetition penalty."""
    roots: Tensor
    """The newest emitted token of each row, int64 [B]; its KV is not in the cache yet."""
    prefill_seconds: float = 0.0
    num_prefilled: int = 0

    def active(self) -> Tensor:
        """1 for the rows still running, 0 for the finished, int64 [B]."""
        return torch.tensor([not row.finished for row in self.rows], device=self.roots.device).long()

    def mark_seen(self, tokens: Tensor) -> None:
        """Note tokens [B] for the repetition penalty."""
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)


class Method(Protocol):
    """A way to get several tokens out of one pass of the target."""

    name: str
    num_nodes: int
    """Most tokens of a row in one target pass: room the cache must have beyond the text."""

    def round(self, state: DecodeState) -> list[list[int]]:
        """Run one round; returns what each row emitted, and leaves the new roots in the state."""
        ...


def decode(state: DecodeState, method: Method, chunk: int = PREFILL_CHUNK) -> Iterator[list[list[int]]]:
    """Prefill, then run rounds until every row is finished; yields what each row kept, at each turn.

    What the cache already holds of a row's prompt (its `lengths`) is not computed again.
    """
    with torch.inference_mode():
        started = time.perf_counter()
        firsts = prefill(state, chunk)
        kept = [row.keep_first(token) for row, token in zip(state.rows, firsts, strict=True)]
        state.prefill_seconds = time.perf_counter() - started
    yield kept
    while not all(row.finished for row in state.rows):
        # Not held across the yield: the mode is the thread's, and the caller runs in between.
        with torch.inference_mode():
            emitted = method.round(state)
        yield [
            [] if row.finished else row.keep_round(tokens)
            for row, tokens in zip(state.rows, emitted, strict=True)
        ]


def start(target: Transformer, cache: KVCache, rows: list[Row], sampling: Sampling) -> DecodeState:
    """The state before prefill."""
    device = target.device
    seen = None
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(len(rows), target.config.vocab_size, dtype=torch.bool, device=device)
        for marks, row in zip(seen, rows, strict=True):
            marks[torch.tensor(row.prompt, device=device)] = True
    seeds = torch.tensor([row.seed for row in rows], device=device)
    roots = torch.zeros(len(rows), dtype=torch.int64, device=device)
    return DecodeState(target, cache, rows, sampling, seeds, seen, roots)


def prefill(state: DecodeState, chunk: int) -> list[int]:
    """Bring every row's prompt into the cache and choose its first token.

    Rows are taken one by one, in chunks, so memory beyond the cache is bounded by the chunk.
    """
    last_hidden = []
    for index, row in enumerate(state.rows):
        cache = state.cache.row(index)
        reused = int(cache.lengths)
        assert reused < len(row.prompt), "the last prompt token must be computed, for its logits"
        tokens = torch.tensor(row.prompt[reused:], device=state.roots.device)
        state.num_prefilled += len(tokens)
        for piece in tokens.split(chunk):
            hidden = state.target(piece[None], cache)
            cache.advance(len(piece))
        last_hidden.append(hidden[:, -1])
    logits = state.target.logits(torch.cat(last_hidden))
    state.roots = choose(logits, state.sampling, state.seeds, state.cache.lengths, state.seen)
    state.mark_seen(state.roots)
    return state.roots.tolist()
