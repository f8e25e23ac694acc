"""Choosing a method by measurement: what a round costs here, against what the draft is known to gain."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longspec.decoding.accept import accept_coupled
from longspec.decoding.choose import Sampling
from longspec.decoding.guard import Prices
from longspec.decoding.loop import DecodeState, Method, run_round, start
from longspec.decoding.methods.make import DEFAULT_TREE, MethodOptions, make_method
from longspec.decoding.row import Row
from longspec.decoding.tree import TokenTree
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.target import Transformer

Drafting = tuple[GlideDraft, DraftHead]

CONTEXTS = (256, 2048)
BATCHES = (1, 4)
CHAINS = (1, 2, 3, 4, 6, 8)
LOOKUPS = (2, 4, 7)
# Of a draft that nobody has measured: each token is as likely as this to be accepted.
ASSUMED = 0.6
# What verifying a looked-up chain may cost, in steps: what is copied is often right at length, and where it
# is not, the guard sees to it.
LOOKUP_COST = 1.6


@dataclass(frozen=True)
class Costs:
    """Seconds of a round: of each candidate at each (context, batch)."""

    seconds: dict[str, float]

    @staticmethod
    def key(candidate: str, context: int, batch: int) -> str:
        """How a measurement is filed."""
        return f"{candidate} @{context} x{batch}"

    def ratio(self, candidate: str, context: int, batch: int) -> float | None:
        """A candidate's round against a vanilla step, at the measured place nearest below."""
        near = max((one for one in CONTEXTS if one <= context), default=CONTEXTS[0])
        rows = max((one for one in BATCHES if one <= batch), default=BATCHES[0])
        one = self.seconds.get(self.key(candidate, near, rows))
        step = self.seconds.get(self.key("vanilla", near, rows))
        return one / step if one and step else None


def candidates(draft: GlideDraft | None, acceptance: dict[str, Any]) -> dict[str, MethodOptions]:
    """What is worth measuring, by name."""
    found = {f"lookup {gamma}": MethodOptions("lookup", gamma=gamma) for gamma in LOOKUPS}
    if draft is None:
        return found
    deepest = draft.config.max_lag
    for gamma in CHAINS:
        if gamma <= deepest:
            found[f"seq {gamma}"] = MethodOptions("seq", gamma=gamma)
    shapes = [tuple(map(int, name.split(","))) for name in acceptance.get("trees", {})] or [DEFAULT_TREE]
    for shape in shapes:
        if len(shape) <= deepest:
            found[f"tree {','.join(map(str, shape))}"] = MethodOptions("tree", tree_shape=shape)
    return found


def gain(options: MethodOptions, acceptance: dict[str, Any]) -> float:
    """Tokens that a round is expected to emit."""
    depth = options.gamma if options.method == "seq" else len(options.tree_shape)
    table: Sequence[float] | None = acceptance.get("chain")
    if options.method == "tree":
        table = acceptance.get("trees", {}).get(",".join(map(str, options.tree_shape)))
    if table is None:
        table = [ASSUMED**power for power in range(1, depth + 1)]
    return 1 + sum(table[:depth])


def num_nodes(options: MethodOptions) -> int:
    """Most nodes of a round, the root counted."""
    if options.method != "tree":
        return options.gamma + 1
    whole = sum(options.tree_shape) + 1
    return min(options.max_nodes or whole, whole)


@dataclass(frozen=True)
class Plan:
    """Which method for which context and batch. Made once, from measurements; the same ever after."""

    costs: Costs
    acceptance: dict[str, Any]
    options: dict[str, MethodOptions]

    def pick(self, context: int, batch: int) -> tuple[MethodOptions, Prices]:
        """The method, and what its rounds cost."""
        best, speed = MethodOptions("vanilla"), 1.0
        for name, options in self.options.items():
            ratio = self.costs.ratio(name, context, batch)
            if ratio is None or options.method == "lookup":
                continue
            if gain(options, self.acceptance) / ratio > speed:
                best, speed = options, gain(options, self.acceptance) / ratio
        if best.method == "vanilla":
            for name, options in self.options.items():
                ratio = self.costs.ratio(name, context, batch)
                if ratio is not None and options.method == "lookup" and ratio <= LOOKUP_COST:
                    best = options  # the longest that is cheap enough: they come in order
        return best, self._prices(best, context, batch)

    def _prices(self, picked: MethodOptions, context: int, batch: int) -> Prices:
        """By nodes: of a chain at every length that was measured, of a tree at its own size."""
        points = []
        for name, options in self.options.items():
            ratio = self.costs.ratio(name, context, batch)
            alike = options.method == picked.method and (options == picked or options.method != "tree")
            if alike and ratio is not None:
                points.append((num_nodes(options), ratio))
        return Prices(tuple(sorted(points)))


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


def measure(
    target: Transformer,
    draft: Drafting | None,
    options: dict[str, MethodOptions],
    limit: int,
    on_measured: Callable[[int], None] = lambda number: None,
) -> Costs:
    """Time a round of every candidate, at every context and batch that `limit` tokens of context allow."""
    seconds = {}
    for context, batch in measured_places(limit):
        for name, one in {"vanilla": MethodOptions("vanilla"), **options}.items():
            method: Method = _Chain(one.gamma) if one.method == "lookup" else _method(one, draft)
            seconds[Costs.key(name, context, batch)] = _time(target, method, context, batch)
            on_measured(1)
    return Costs(seconds)


def measured_places(limit: int) -> Iterable[tuple[int, int]]:
    """The (context, batch) pairs that are measured: every context alone, and the shortest in a batch."""
    for context in CONTEXTS:
        if context == CONTEXTS[0] or context < limit:
            yield context, 1
    yield CONTEXTS[0], BATCHES[1]


def _method(options: MethodOptions, draft: Drafting | None) -> Method:
    return make_method(options, Sampling(), draft)[0]


def _time(target: Transformer, method: Method, context: int, batch: int, repeats: int = 4) -> float:
    cache = target.new_cache(batch, context + 2 * method.num_nodes)
    cache.keys.zero_()
    cache.values.zero_()
    rows = [Row([1] * context, 0, 10**6) for _ in range(batch)]
    state = start(target, cache, rows, Sampling())
    target.rope.reserve(cache.capacity)
    times = []
    with torch.inference_mode():
        cache.advance(context)
        method.begin(state)
        for _ in range(repeats + 1):
            started = time.perf_counter()
            run_round(state, method, accept_coupled)
            times.append(time.perf_counter() - started)
            cache.truncate(torch.full_like(cache.lengths, context))
    # The first has the set-up of kernels in it; of the rest the fastest is the least disturbed.
    return min(statistics.median(times[1:]), min(times[1:]) * 1.2)
