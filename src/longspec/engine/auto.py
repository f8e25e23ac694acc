"""`auto`: which method a turn runs, by what its rounds cost here and what the rows are known to gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longspec.decoding.expected import gain, num_nodes, tree_name, tree_named
from longspec.decoding.methods.make import MethodOptions
from longspec.engine.costs import Costs
from longspec.models.draft import GlideDraft

VANILLA = MethodOptions("vanilla")
CHAINS = (1, 2, 3, 4, 6)
LOOKUPS = (2, 4, 7)
# Trees by their nodes, and how deep: a larger one has more to gain from depth.
TREES = {8: 4, 16: 5, 32: 6, 64: 8}
# On a CPU nodes are dear; elsewhere the largest of these fills a tile of our kernels.
MOST_NODES_ON_CPU = 16
# Where the host is at hand, a chain may end where the draft doubts: a pass of the draft is saved.
MIN_CONFIDENCE = 0.2
# Where rounds are captured, trees look up as well: up to so many tokens.
NUM_LOOKUP = 12
# What a looked-up token is worth: the first, where there is a match, and each further one.
FIRST_RIGHT, NEXT_RIGHT = 0.7, 0.85
# Of the rows whose next tokens can be looked up nobody knows on a GPU: so many at first.
ASSUMED_MATCHES = 0.3
# Speculation must promise so much more than vanilla.
LEAST_SPEED = 1.03


class Outlook:
    """How a sequence's rounds turn out against what is expected of them, for drafts and for lookup.

    It follows what is observed by `LEARNS` of each round's surprise. While nothing is tried it goes back to
    where it began, so slowly that trying again costs a hundredth of the time.
    """

    LEARNS, RETURNS, MOST = 0.1, 0.003, 3.0
    # A draft's tokens are accepted less often at a temperature: at 0.7 about two thirds of the gain are left.
    COOLS = 0.45

    def __init__(self, temperature: float) -> None:
        self._start = {"draft": max(1 - self.COOLS * temperature, 0.3), "lookup": 1.0}
        self._share = dict(self._start)

    def expects(self, kind: str, gained: float) -> float:
        """Tokens of a round, where `gained` is what a round gains on average."""
        return 1 + self._share[kind] * (gained - 1)

    def learn(self, kind: str | None, gained: float, emitted: int) -> None:
        """A round of this kind, which gains so much on average, emitted so many tokens; None: vanilla."""
        for one, start in self._start.items():
            if one == kind:
                found = min((emitted - 1) / max(gained - 1, 0.01), self.MOST)
                self._share[one] += self.LEARNS * (found - self._share[one])
            else:
                self._share[one] += self.RETURNS * (start - self._share[one])


def kind_of(options: MethodOptions) -> str | None:
    """What an outlook files a method's rounds under."""
    return {"vanilla": None, "lookup": "lookup"}.get(options.method, "draft")


def candidates(
    draft: GlideDraft | None, acceptance: Mapping[str, Any], fused: bool
) -> dict[str, MethodOptions]:
    """What is worth a try, by name. Where rounds are captured, a chain costs hardly less than a small tree,
    and trees look up as well, so that lookup alone is for targets without a draft."""
    lookups = LOOKUPS if draft is None or not fused else ()
    found = {f"lookup {gamma}": MethodOptions("lookup", gamma=gamma) for gamma in lookups}
    if draft is None:
        return found
    deepest = draft.config.max_lag
    for gamma in () if fused else CHAINS:
        if gamma <= deepest:
            found[f"seq {gamma}"] = MethodOptions("seq", gamma=gamma, min_confidence=MIN_CONFIDENCE)
    trees = [tree_named(name) for name in acceptance.get("trees", {})]
    known = {num_nodes(tree) for tree in trees if len(tree.tree_shape) <= deepest}
    trees += [_tree(nodes, min(depth, deepest)) for nodes, depth in TREES.items() if nodes not in known]
    for tree in trees:
        small = num_nodes(tree) <= (max(TREES) if fused else MOST_NODES_ON_CPU)
        if small and len(tree.tree_shape) <= deepest:
            found[f"tree {tree_name(tree)}"] = replace(tree, num_copied=NUM_LOOKUP if fused else 0)
    return found


def _tree(nodes: int, depth: int) -> MethodOptions:
    """The best so many nodes of a tree that is drafted wider."""
    widths = tuple(min(4 if level == 0 else 16, nodes // 2) for level in range(depth))
    return MethodOptions("tree", tree_shape=widths, max_nodes=nodes)


@dataclass
class Policy:
    """Picks the method that promises the most tokens a second of all rows together."""

    options: Mapping[str, MethodOptions]
    acceptance: Mapping[str, Any]
    costs: Costs
    gains: dict[MethodOptions, float] = field(default_factory=dict)

    def gain(self, options: MethodOptions) -> float:
        """Tokens that a round is expected to emit of a row; by lookup, of one that has a match."""
        if options not in self.gains:
            if options.method == "lookup":
                chances = [FIRST_RIGHT * NEXT_RIGHT**step for step in range(options.gamma)]
                self.gains[options] = 1 + sum(chances)
            else:
                self.gains[options] = gain(options, self.acceptance)
        return self.gains[options]

    def pick(
        self,
        outlooks: Sequence[Outlook],
        matches: Sequence[bool] | None,
        num_rows: int,
        context: int,
        max_nodes: int | None = None,
    ) -> MethodOptions:
        """For rows with these outlooks, in a bucket of `num_rows`, about `context` tokens long each.

        `matches` tells which rows have something to look up, where the host knows.
        """
        best, most = VANILLA, LEAST_SPEED * len(outlooks) / self.costs.seconds("vanilla", num_rows, context)
        for name, options in self.options.items():
            if max_nodes is not None and num_nodes(options) > max_nodes:
                continue
            expected, gained = 0.0, self.gain(options)
            for index, outlook in enumerate(outlooks):
                if options.method != "lookup":
                    expected += outlook.expects("draft", gained)
                elif matches is None:
                    expected += outlook.expects("lookup", 1 + ASSUMED_MATCHES * (gained - 1))
                else:
                    expected += outlook.expects("lookup", gained) if matches[index] else 1.0
            promised = expected / self.costs.seconds(name, num_rows, context)
            if promised > most:
                best, most = options, promised
        return best

    def learn(self, outlook: Outlook, options: MethodOptions, emitted: int, has_match: bool | None) -> None:
        """Tell a row's outlook what a round has emitted."""
        kind, gained = kind_of(options), 1.0
        if kind is not None:
            gained = self.gain(options)
        if kind == "lookup" and has_match is None:
            gained = 1 + ASSUMED_MATCHES * (gained - 1)
        if kind == "lookup" and has_match is False:
            kind = None
        outlook.learn(kind, gained, emitted)
