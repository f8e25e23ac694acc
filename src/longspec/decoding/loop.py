"""The round loop: propose, verify, accept, commit, for all rows at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longspec.cache import KVCache
from longspec.decoding.accept import Accepted, LogitsAt, accept_coupled
from longspec.decoding.choose import Sampling, choose
from longspec.decoding.row import Row
from longspec.decoding.tree import TokenTree
from longspec.models.target import Transformer

PREFILL_CHUNK = 2048
# Up to so many nodes their logits cost hardly more than those of one: the head is read once for all.
_FEW_NODES = 16


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
    emitted: Tensor
    """What the last round emitted, int64 [B, T]; a row's own are its first `num_emitted` [B]."""
    num_emitted: Tensor
    feature: Tensor
    """The target's final hidden state at the newest token whose KV is in the cache, [B, E]."""
    prefill_seconds: float = 0.0
    num_prefilled: int = 0

    @property
    def roots(self) -> Tensor:
        """The newest emitted token of each row, int64 [B]; its KV is not in the cache yet."""
        if self.emitted.shape[1] == 1:
            return self.emitted[:, 0]
        return self.emitted.gather(1, self.num_emitted[:, None] - 1)[:, 0]


class Method(Protocol):
    """A way to propose what the target may say next."""

    name: str
    num_nodes: int
    """Most nodes of a tree it proposes: room that the cache must have beyond the text."""
    depth: int
    """Most tokens that one of its trees may have accepted."""
    tree_shape: tuple[int, ...] | None
    device_key: tuple[Hashable, ...] | None
    """What tells this method's rounds from those of others where they need nothing of the host; else None."""

    def begin(self, state: DecodeState) -> None:
        """Prepare, once the prompts are in the cache and the first roots are chosen."""
        ...

    def follow(self, state: DecodeState) -> None:
        """Instead of `propose`, in a round that proposes nothing: take in what the last one emitted."""
        ...

    def propose(self, state: DecodeState) -> TokenTree:
        """A tree for every row, whose root is the row's."""
        ...


Acceptance = Callable[
    [TokenTree, LogitsAt, Sampling, Tensor, Tensor, Tensor | None],
    Accepted,
]


Rounds = Callable[[DecodeState, Method, Acceptance], Iterator[list[list[int]]]]
"""Gives what each row emits, round by round, once the prompts are in the cache."""


Fill = Callable[[DecodeState], bool]
"""Brings the prompts into the cache, and says so; or leaves it to the loop."""


def decode(
    state: DecodeState,
    method: Method,
    acceptance: Acceptance = accept_coupled,
    chunk: int = PREFILL_CHUNK,
    rounds: Rounds | None = None,
    fill: Fill | None = None,
) -> Iterator[list[list[int]]]:
    """Prefill, then run rounds until every row is finished; yields what each row kept, at each turn.

    What the cache already holds of a row's prompt (its `lengths`) is not computed again. `rounds` gives the
    rounds another home than this loop, such as a captured graph, and so does `fill` for short prompts.
    """
    with torch.inference_mode():
        started = time.perf_counter()
        prefill(state, chunk, fill)
        firsts = state.roots.tolist()
        kept = [row.keep_first(token) for row, token in zip(state.rows, firsts, strict=True)]
        state.prefill_seconds = time.perf_counter() - started
    yield kept
    # Not held across a yield: the mode is the thread's, and the caller runs in between.
    with torch.inference_mode():
        emitting = (rounds or host_rounds)(state, method, acceptance)
    while not all(row.finished for row in state.rows):
        with torch.inference_mode():
            kept = keep(state, next(emitting))
        yield kept


def host_rounds(state: DecodeState, method: Method, acceptance: Acceptance) -> Iterator[list[list[int]]]:
    """The plain `Rounds`: the host looks at each one before the next."""
    method.begin(state)
    while True:
        yield run_round(state, method, acceptance)
        _stop_finished(state)


def keep(state: DecodeState, emitted: list[list[int]]) -> list[list[int]]:
    """Hand what a round emitted to the rows; returns what each one kept."""
    return [
        [] if row.finished else row.keep_round(tokens)
        for row, tokens in zip(state.rows, emitted, strict=True)
    ]


def _stop_finished(state: DecodeState) -> None:
    """Put rows that are finished back to their end, which a round may have run past.

    They are computed along with the others and write their nodes behind their prefix, for which there is
    room only if they stand at their end and not beyond.
    """
    if any(row.finished for row in state.rows):
        ends = [
            len(row.prompt) + len(row.tokens) - 1 if row.finished else state.cache.capacity
            for row in state.rows
        ]
        state.cache.truncate(torch.tensor(ends))


def run_round(state: DecodeState, method: Method, acceptance: Acceptance) -> list[list[int]]:
    """Propose, verify, accept, commit; returns what each row emitted."""
    tree = method.propose(state)
    hidden = state.target(tree.tokens, state.cache, tree.sees())
    logits_at = _logits_at(state.target, hidden)
    found = acceptance(tree, logits_at, state.sampling, state.seeds, state.cache.lengths, state.seen)
    running = torch.tensor([not row.finished for row in state.rows], device=hidden.device)
    emitted, num_emitted = advance(state, tree, hidden, found, running)
    _mark_seen(state, emitted, num_emitted)
    state.emitted, state.num_emitted = emitted, num_emitted
    counts = num_emitted.tolist()
    return [tokens[:count] for tokens, count in zip(emitted.tolist(), counts, strict=True)]


def advance(
    state: DecodeState, tree: TokenTree, hidden: Tensor, found: Accepted, running: Tensor
) -> tuple[Tensor, Tensor]:
    """Commit what was accepted in the rows that are `running` [B]; returns what was emitted, and how much.

    A row that is finished stands still, with its root as the one thing it emitted. Nothing is asked of the
    host, and what is part of the state keeps its place in memory.
    """
    rows = torch.arange(len(running), device=hidden.device)
    fused = state.target.attention.fuses(hidden)
    state.cache.commit(found.path, (found.num_accepted + 1) * running, fused)
    last = hidden[rows, found.path[:, -1]]
    state.feature.copy_(torch.where(running[:, None], last, state.feature))
    # The path without the root, then the bonus right behind each row's last accepted token.
    emitted = torch.cat((tree.tokens.gather(1, found.path)[:, 1:], found.bonus[:, None]), 1)
    emitted.scatter_(1, found.num_accepted[:, None], found.bonus[:, None])
    emitted[:, 0] = torch.where(running, emitted[:, 0], tree.tokens[:, 0])
    return emitted, torch.where(running, found.num_accepted + 1, 1)


def _logits_at(target: Transformer, hidden: Tensor) -> LogitsAt:
    """The logits of a node per row: of small trees all at once, of larger ones where they are asked for."""
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    if hidden.shape[1] <= _FEW_NODES:
        logits = target.logits(hidden)
        return lambda nodes: logits[rows, nodes]
    return lambda nodes: target.logits(hidden[rows, nodes])


def _mark_seen(state: DecodeState, emitted: Tensor, num_emitted: Tensor) -> None:
    """Note what was emitted for the repetition penalty."""
    if state.seen is None:
        return
    real = torch.arange(emitted.shape[1], device=emitted.device) < num_emitted[:, None]
    # What lies behind a row's own tokens is replaced by its first one, which is noted anyway.
    state.seen.scatter_(1, torch.where(real, emitted, emitted[:, :1]), True)


def start(target: Transformer, cache: KVCache, rows: list[Row], sampling: Sampling) -> DecodeState:
    """The state before prefill."""
    device = target.device
    seen = None
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(len(rows), target.config.vocab_size, dtype=torch.bool, device=device)
        for marks, row in zip(seen, rows, strict=True):
            marks[torch.tensor(row.prompt, device=device)] = True
    seeds = torch.tensor([row.seed for row in rows], device=device)
    ones = torch.ones(len(rows), dtype=torch.int64, device=device)
    feature = torch.zeros(len(rows), target.config.hidden_size, device=device, dtype=target.dtype)
    return DecodeState(target, cache, rows, sampling, seeds, seen, ones[:, None], ones, feature)


def prefill(state: DecodeState, chunk: int, fill: Fill | None = None) -> None:
    """Bring every row's prompt into the cache and choose its first token."""
    if fill is None or not fill(state):
        _fill(state, chunk)
    logits = state.target.logits(state.feature)
    firsts = choose(logits, state.sampling, state.seeds, state.cache.lengths, state.seen)
    state.emitted = firsts[:, None]
    _mark_seen(state, state.emitted, state.num_emitted)


def _fill(state: DecodeState, chunk: int) -> None:
    """Bring the prompts into the cache, in chunks and row by row, so that the chunk bounds the memory."""
    last_hidden = []
    for index, row in enumerate(state.rows):
        cache = state.cache.row(index)
        reused = int(cache.lengths)
        assert reused < len(row.prompt), "the last prompt token must be computed, for its logits"
        tokens = torch.tensor(row.prompt[reused:], device=state.target.device)
        state.num_prefilled += len(tokens)
        for piece in tokens.split(chunk):
            hidden = state.target(piece[None], cache)
            cache.advance(len(piece))
        last_hidden.append(hidden[:, -1])
    state.feature = torch.cat(last_hidden)
