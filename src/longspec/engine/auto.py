"""`auto`: which method a turn runs, by what its rounds cost here and what the rows are known to gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longspec.decoding.methods import VANILLA, Lookup, Method, Tree
from longspec.decoding.methods.registry import methods
from longspec.engine.costs import Costs
from longspec.models.draft import GlideDraft

# Share of the rows that have something to look up, where the host does not know (fused rounds).
ASSUMED_MATCHES = 0.3
# Speculation must promise so much more than vanilla.
LEAST_SPEED = 1.03


class Outlook:
    """How a sequence's rounds turn out against what is expected of them, for each source of proposals.

    It follows what is observed by `LEARNS` of each round's surprise. While nothing is tried it goes back to
    where it began, so slowly that trying again costs a hundredth of the time.
    """

    LEARNS, RETURNS, MOST = 0.1, 0.003, 3.0
    # A draft's tokens are accepted less often at a temperature: at 0.7 about two thirds of the gain are left.
    COOLS = 0.45

    def __init__(self, temperature: float) -> None:
        self._start = {"draft": max(1 - self.COOLS * temperature, 0.3), "lookup": 1.0}
        self.shares = dict(self._start)
        """By source: the share of the accepted tokens of an average round that this sequence accepts."""

    def learn(self, source: str | None, gained: float, emitted: int) -> None:
        """A round, which gains so much on average, emitted so many tokens; None: nothing was proposed."""
        for one, start in self._start.items():
            if one == source:
                found = min((emitted - 1) / max(gained - 1, 0.01), self.MOST)
                self.shares[one] += self.LEARNS * (found - self.shares[one])
            else:
                self.shares[one] += self.RETURNS * (start - self.shares[one])


def candidates(draft: GlideDraft | None, acceptance: Mapping[str, Any], fused: bool) -> tuple[Method, ...]:
    """What is worth a try beside vanilla, as each method says."""
    config = None if draft is None else draft.config
    return tuple(one for cls in methods().values() for one in cls.candidates(config, acceptance, fused))


def unmeasured(draft: GlideDraft | None) -> tuple[Method, ...]:
    """What there is to choose from while nothing is measured: one method beside vanilla."""
    if draft is None:
        return (Lookup(),)
    tree = Tree()
    return (replace(tree, tree_shape=tree.tree_shape[: draft.config.max_lag]),)


@dataclass
class Policy:
    """Picks the method that promises the most tokens a second of all rows together."""

    methods: tuple[Method, ...]
    acceptance: Mapping[str, Any]
    costs: Costs
    gains: dict[Method, float] = field(default_factory=dict)

    def gain(self, method: Method) -> float:
        """Tokens that a round is expected to emit of a row; by lookup, of one that has a match."""
        if method not in self.gains:
            self.gains[method] = method.gain(self.acceptance)
        return self.gains[method]

    def pick(
        self,
        outlooks: Sequence[Outlook],
        matches: Sequence[bool] | None,
        num_rows: int,
        context: int,
        max_nodes: int | None = None,
    ) -> Method:
        """For rows with these outlooks, in a bucket of `num_rows`, about `context` tokens long each.

        `matches` tells which rows have something to look up, where the host knows.
        """
        has_match = [ASSUMED_MATCHES] * len(outlooks) if matches is None else matches
        shares = {
            None: len(outlooks),
            "draft": sum(one.shares["draft"] for one in outlooks),
            "lookup": sum(
                one.shares["lookup"] * match for one, match in zip(outlooks, has_match, strict=True)
            ),
        }
        best: Method = VANILLA
        most = LEAST_SPEED * len(outlooks) / self.costs.seconds(VANILLA, num_rows, context)
        for method in self.methods:
            if max_nodes is not None and method.num_nodes > max_nodes:
                continue
            expected = len(outlooks) + shares[method.source] * (self.gain(method) - 1)
            promised = expected / self.costs.seconds(method, num_rows, context)
            if promised > most:
                best, most = method, promised
        return best

    def learn(self, outlook: Outlook, method: Method, emitted: int, has_match: bool | None) -> None:
        """Tell a row's outlook what a round has emitted."""
        source, gained = method.source, self.gain(method)
        if source == "lookup" and has_match is None:
            gained = 1 + ASSUMED_MATCHES * (gained - 1)
        if source == "lookup" and has_match is False:
            source = None
        outlook.learn(source, gained, emitted)
