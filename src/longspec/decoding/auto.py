"""Choosing a method by measurement: what a round costs here, against what the draft is known to gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from longspec.decoding.expected import chain_length, gain, num_nodes, tree_name, tree_named
from longspec.decoding.guard import Prices, on_line
from longspec.decoding.methods.make import MethodOptions
from longspec.decoding.timing import Times
from longspec.models.draft import GlideDraft

CHAINS = (1, 2, 3, 4, 6)
LOOKUPS = (2, 4, 7)
# Trees by their nodes, and how deep: a larger one has more to gain from depth.
TREES = {8: 4, 16: 5, 32: 6, 64: 8}
# On a CPU nodes are dear; elsewhere the largest of these fills a tile of our kernels.
MOST_NODES_ON_CPU = 16
# Between rounds of the host a chain may end where the draft doubts: a pass of the draft is saved.
MIN_CONFIDENCE = 0.2
# Where rounds are replayed, trees copy as well: up to so many tokens.
NUM_COPIED = 12
# In a batch all wait for the slowest row, which gains so much of what a row gains on average: measured with 4
# and 8 rows.
SLOWEST = 0.7
# What promises less against vanilla is not worth what the guard may lose on it.
LEAST_SPEED = 1.1
# What verifying a looked-up chain may cost, in steps: what is copied is often right at length, and where it
# is not, the guard sees to it.
LOOKUP_COST = 1.6


@dataclass(frozen=True)
class Costs:
    """Seconds of a round of each candidate, as far as they were measured."""

    times: Times

    def ratio(self, candidate: str, context: int) -> float | None:
        """A candidate's round against a vanilla step; None where it was not measured."""
        one, step = (self._seconds(name, context) for name in (candidate, "vanilla"))
        # Nothing is faster than the target alone: where it seemed so, something else held that up.
        return max(one / step, 1.0) if one and step else None

    def _seconds(self, name: str, context: int) -> float | None:
        times = self.times.get(name)
        return on_line(sorted(times), context) if times else None


def candidates(
    draft: GlideDraft | None, acceptance: Mapping[str, Any], on_cpu: bool = True, replays: bool = False
) -> dict[str, MethodOptions]:
    """What is worth measuring, by name. Where rounds are replayed, what needs the host is not, and a chain
    costs hardly less than a small tree."""
    found = {} if replays else {f"lookup {gamma}": MethodOptions("lookup", gamma=gamma) for gamma in LOOKUPS}
    if draft is None:
        return found
    deepest = draft.config.max_lag
    for gamma in () if replays else CHAINS:
        if gamma <= deepest:
            found[f"seq {gamma}"] = MethodOptions("seq", gamma=gamma, min_confidence=MIN_CONFIDENCE)
    trees = [tree_named(name) for name in acceptance.get("trees", {})]
    known = {num_nodes(tree) for tree in trees if len(tree.tree_shape) <= deepest}
    trees += [_tree(nodes, min(depth, deepest)) for nodes, depth in TREES.items() if nodes not in known]
    for tree in trees:
        small = num_nodes(tree) <= (MOST_NODES_ON_CPU if on_cpu else max(TREES))
        if small and len(tree.tree_shape) <= deepest:
            found[f"tree {tree_name(tree)}"] = replace(tree, num_copied=NUM_COPIED if replays else 0)
    return found


def _tree(nodes: int, depth: int) -> MethodOptions:
    """The best so many nodes of a tree that is drafted wider."""
    widths = tuple(min(4 if level == 0 else 16, nodes // 2) for level in range(depth))
    return MethodOptions("tree", tree_shape=widths, max_nodes=nodes)


@dataclass(frozen=True)
class Plan:
    """Which method for which context, at one batch. Made once, from measurements; the same ever after."""

    costs: Costs
    acceptance: Mapping[str, Any]
    options: Mapping[str, MethodOptions]
    num_rows: int = 1

    def pick(self, context: int) -> tuple[MethodOptions, Prices]:
        """The method, and what its rounds cost."""
        best, speed = MethodOptions("vanilla"), LEAST_SPEED
        for name, options in self.options.items():
            if options.method == "lookup" or self.costs.ratio(name, context) is None:
                continue
            drafted = (
                chain_length(options, self.acceptance, self.num_rows) + 1
                if options.method == "seq"
                else num_nodes(options)
            )
            promised = self._gain(options) / self._prices(options, context)(drafted)
            if promised > speed:
                best, speed = options, promised
        if best.method == "vanilla":
            return self.lookup(context) or (best, Prices(()))
        return best, self._prices(best, context)

    def _gain(self, options: MethodOptions) -> float:
        """Tokens of a round, of the row on which the others wait."""
        return 1 + self._share * (gain(options, self.acceptance) - 1)

    @property
    def _share(self) -> float:
        return SLOWEST if self.num_rows > 1 else 1.0

    def lookup(self, context: int) -> tuple[MethodOptions, Prices] | None:
        """The longest lookup that is cheap enough, and what its rounds cost."""
        found, most = None, 1 + self._share * (LOOKUP_COST - 1)
        for name, options in self.options.items():  # they come in order
            ratio = self.costs.ratio(name, context)
            if ratio is not None and options.method == "lookup" and ratio <= most:
                found = options
        return None if found is None else (found, self._prices(found, context))

    def _prices(self, picked: MethodOptions, context: int) -> Prices:
        """By nodes: of a chain at every length that was measured, of a tree at its own size.

        What else a machine does can only make a round seem slower. So one costs no more than a longer one.
        """
        points: list[tuple[int, float]] = []
        for name, options in self.options.items():
            ratio = self.costs.ratio(name, context)
            alike = options.method == picked.method and (options == picked or options.method != "tree")
            if alike and ratio is not None:
                points.append((num_nodes(options), ratio))
        points.sort()
        return Prices(
            tuple((nodes, min(cost for _, cost in points[at:])) for at, (nodes, _) in enumerate(points))
        )
