"""Timing a round of each candidate as it will run: replayed where rounds are replayed, else by the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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

# Contexts at which rounds are timed, alone; in a batch only the first. Each batch is timed when the first
# request of that size, or of one up to the next, comes.
HOST_CONTEXTS, REPLAYED_CONTEXTS = (256, 2048), (1024, 4096, 16384, 65536)
BATCHES = (2, 4, 8, 16, 32)
# Rounds that are timed, after one or more that are not: by the host so many at least, and at most.
HOST_ROUNDS, REPLAYED_ROUNDS = (3, 6), 16
# The two fastest must agree so well, or the host goes on: what is measured now is believed for long.
AGREEMENT = 1.05

Times = dict[str, list[tuple[int, float]]]
"""By name: (context, seconds of a round)."""


def place_of(target: Transformer, limit: int, replays: bool, num_rows: int) -> tuple[int, tuple[int, ...]]:
    """The batch that is timed for so many rows, and the contexts: what `limit` and the memory allow.

    Times grow along a line with the context, so that those of longer ones follow.
    """
    contexts = REPLAYED_CONTEXTS if replays else HOST_CONTEXTS
    per_token = target.config.kv_bytes_per_token(target.dtype.itemsize)
    # Half of what is free: the rounds themselves need some too.
    room = free_memory(target.device) // 2 // per_token
    first = min(contexts[0], limit - 1)
    batch = max((one for one in BATCHES if one <= num_rows and one * first < room), default=1)
    if batch > 1:
        return batch, (first,)
    return 1, (first, *(context for context in contexts[1:] if context < min(limit, room)))


def measure(
    target: Transformer,
    draft: Drafting | None,
    options: Mapping[str, MethodOptions],
    place: tuple[int, tuple[int, ...]],
    replays: bool,
    on_measured: Callable[[int], None] = lambda number: None,
) -> Times:
    """Time a round of every candidate and of vanilla at a place of `place_of`."""
    batch, contexts = place
    timed = {"vanilla": MethodOptions("vanilla"), **options}
    found: Times = {name: [] for name in timed}
    methods = {name: _method(one, draft) for name, one in timed.items()}
    slack = max(_slack(method) for method in methods.values())
    cache = target.new_cache(batch, contexts[-1] + slack)
    cache.keys.zero_()
    cache.values.zero_()
    target.rope.reserve(cache.capacity)
    time_all = _time_replayed if replays else _time_on_host
    with torch.inference_mode():
        for name, context, seconds in time_all(target, cache, methods, contexts):
            found[name].append((context, seconds))
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


def _state(target: Transformer, cache: KVCache, context: int) -> DecodeState:
    """Behind so many tokens, none of which mean anything."""
    rows = [Row([1] * context, 0, cache.capacity - context) for _ in range(cache.num_rows)]
    cache.lengths.fill_(context)
    return start(target, cache, rows, Sampling())


def _time_replayed(
    target: Transformer, cache: KVCache, methods: Mapping[str, Method], contexts: Sequence[int]
) -> Iterator[tuple[str, int, float]]:
    """Method by method, for what is captured serves all contexts, and takes memory while it is there."""
    for name, method in methods.items():
        assert method.device_key is not None, name
        captured = DeviceRounds(_state(target, cache, contexts[0]), method)
        for context in contexts:
            rounds = captured.run(_state(target, cache, context))
            yield name, context, seconds_a_round(rounds, 4, REPLAYED_ROUNDS)
        if target.device.type == "cuda":
            # One round is on its way, and its graph goes now. Not the whole device: another thread may be
            # capturing, which that would break.
            torch.cuda.current_stream(target.device).synchronize()


def seconds_a_round(rounds: Iterator[object], warm_up: int, count: int) -> float:
    """Of `count` rounds, the host's reading included, after some that are not timed."""
    for _ in range(warm_up):
        next(rounds)
    started = time.perf_counter()
    for _ in range(count):
        next(rounds)
    return (time.perf_counter() - started) / count


def _time_on_host(
    target: Transformer, cache: KVCache, methods: Mapping[str, Method], contexts: Sequence[int]
) -> Iterator[tuple[str, int, float]]:
    """By turns, so that what else the machine does disturbs all alike; the least disturbed turn counts."""
    for context in contexts:
        states = {name: _state(target, cache, context) for name in methods}
        times: dict[str, list[float]] = {name: [] for name in methods}
        for name, method in methods.items():
            method.begin(states[name])
        least, most = HOST_ROUNDS
        open_names = list(methods)
        for turn in range(most + 1):
            for name in open_names:
                started = time.perf_counter()
                run_round(states[name], methods[name], accept_coupled)
                seconds = time.perf_counter() - started
                cache.lengths.fill_(context)
                if turn > 0:  # the first has the set-up of kernels in it
                    times[name].append(seconds)
            if turn >= least:
                unsettled = {name for name in open_names if not _agree(times[name])}
                # All the others are held against vanilla, which is therefore timed to the end.
                open_names = [name for name in methods if name in unsettled | {"vanilla"} and unsettled]
        for name in methods:
            yield name, context, min(times[name])


def _agree(seconds: list[float]) -> bool:
    fastest, second = sorted(seconds)[:2]
    return second <= AGREEMENT * fastest


class _Chain:
    """Proposes nonsense, to time what verifying so many nodes costs."""

    name = "chain"
    tree_shape: tuple[int, ...] | None = None
    device_key: tuple[Hashable, ...] | None = None

    def __init__(self, gamma: int) -> None:
        self.num_nodes, self.depth = gamma + 1, gamma

    def begin(self, state: DecodeState) -> None:
        """Nothing to do."""

    def follow(self, state: DecodeState) -> None:
        """Nothing to do."""

    def propose(self, state: DecodeState) -> TokenTree:
        """The root, over and over."""
        return TokenTree.chain(state.roots[:, None].repeat(1, self.num_nodes))
