"""Timing a round of each candidate as it will run: replayed where rounds are replayed, else by the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import torch

from longspec.cache import KVCache
from longspec.decoding.accept import accept_coupled
from longspec.decoding.choose import Sampling
from longspec.decoding.device import DeviceRounds, width_of
from longspec.decoding.loop import DecodeState, Method, run_round, start
from longspec.decoding.methods.make import Drafting, MethodOptions, make_method
from longspec.decoding.row import Row
from longspec.decoding.tree import TokenTree
from longspec.models.placement import free_memory
from longspec.models.target import Transformer

# Contexts at which rounds are timed, alone; in a batch only the first.
HOST_CONTEXTS, HOST_BATCHES = (256, 2048), (1, 4)
REPLAYED_CONTEXTS, REPLAYED_BATCHES = (1024, 4096, 16384, 65536), (1, 4, 16)
# Rounds that are timed, after one or more that are not.
HOST_ROUNDS, REPLAYED_ROUNDS = 4, 16

Times = dict[str, list[tuple[int, int, float]]]
"""By name: (batch, context, seconds of a round)."""


def places(target: Transformer, limit: int, replays: bool) -> list[tuple[int, tuple[int, ...]]]:
    """Each batch with the contexts at which it is timed: those that `limit` and the memory allow.

    Times grow along a line with the context, so that those of longer ones follow.
    """
    contexts = REPLAYED_CONTEXTS if replays else HOST_CONTEXTS
    batches = REPLAYED_BATCHES if replays else HOST_BATCHES
    per_token = target.config.kv_bytes_per_token(target.dtype.itemsize)
    # Half of what is free: the rounds themselves need some too.
    room = min(limit, free_memory(target.device) // 2 // per_token)
    first = min(contexts[0], limit - 1)
    longer = tuple(context for context in contexts[1:] if context < room)
    return [(batch, (first, *longer) if batch == 1 else (first,)) for batch in batches]


def measure(
    target: Transformer,
    draft: Drafting | None,
    options: Mapping[str, MethodOptions],
    where: list[tuple[int, tuple[int, ...]]],
    replays: bool,
    on_measured: Callable[[int], None] = lambda number: None,
) -> Times:
    """Time a round of every candidate and of vanilla at each of the `places`."""
    timed = {"vanilla": MethodOptions("vanilla"), **options}
    found: Times = {name: [] for name in timed}
    slack = max(_slack(_method(one, draft)) for one in timed.values())
    for batch, contexts in where:
        cache = target.new_cache(batch, contexts[-1] + slack)
        cache.keys.zero_()
        cache.values.zero_()
        target.rope.reserve(cache.capacity)
        for name, one in timed.items():
            method = _method(one, draft)
            clock = _Clock(target, cache, method, replays and method.device_key is not None)
            for context in contexts:
                found[name].append((batch, context, clock.seconds(context)))
                on_measured(1)
    return found


def _method(options: MethodOptions, draft: Drafting | None) -> Method:
    if options.method == "lookup":
        return _Chain(options.gamma)
    # A chain is timed in full: where it ends early, it costs what a shorter one does.
    return make_method(replace(options, min_confidence=0.0), Sampling(), draft)[0]


def _slack(method: Method) -> int:
    """The most entries behind the context that timing takes."""
    return (REPLAYED_ROUNDS + 8) * width_of(method) + method.num_nodes


class _Clock:
    """Times the rounds of one method over one cache; what is captured is captured once for all contexts."""

    def __init__(self, target: Transformer, cache: KVCache, method: Method, replayed: bool) -> None:
        self._target, self._cache, self._method = target, cache, method
        self._replayed = replayed
        self._rounds: DeviceRounds | None = None

    def seconds(self, context: int) -> float:
        """Of one round behind so many tokens, none of which mean anything."""
        new = self._cache.capacity - context
        rows = [Row([1] * context, 0, new) for _ in range(self._cache.num_rows)]
        state = start(self._target, self._cache, rows, Sampling())
        with torch.inference_mode():
            self._cache.lengths.fill_(context)
            return self._replay(state) if self._replayed else self._run(state, context)

    def _replay(self, state: DecodeState) -> float:
        if self._rounds is None:
            self._rounds = DeviceRounds(state, self._method)
        rounds = self._rounds.run(state)
        for _ in range(4):
            next(rounds)
        started = time.perf_counter()
        for _ in range(REPLAYED_ROUNDS):
            next(rounds)
        return (time.perf_counter() - started) / REPLAYED_ROUNDS

    def _run(self, state: DecodeState, context: int) -> float:
        self._method.begin(state)
        times = []
        for _ in range(HOST_ROUNDS + 1):
            started = time.perf_counter()
            run_round(state, self._method, accept_coupled)
            times.append(time.perf_counter() - started)
            self._cache.lengths.fill_(context)
        # The first has the set-up of kernels in it; of the rest the fastest is the least disturbed.
        return min(statistics.median(times[1:]), min(times[1:]) * 1.2)


class _Chain:
    """Proposes nonsense, to time what verifying so many nodes costs."""

    name = "chain"
    tree_shape: tuple[int, ...] | None = None
    device_key: tuple[Hashable, ...] | None = None

    def __init__(self, gamma: int) -> None:
        self.num_nodes = gamma + 1

    def begin(self, state: DecodeState) -> None:
        """Nothing to do."""

    def follow(self, state: DecodeState) -> None:
        """Nothing to do."""

    def propose(self, state: DecodeState) -> TokenTree:
        """The root, over and over."""
        return TokenTree.chain(state.roots[:, None].repeat(1, self.num_nodes))
