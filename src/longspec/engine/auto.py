"""Methods as an engine runs them, and `auto`: which of them a turn takes.

`auto` decides by the cost of a method's rounds and by the tokens that it expects from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from longspec.decoding.methods import VANILLA, Lookup, Method, Seq, Tree
from longspec.decoding.methods.registry import methods
from longspec.decoding.methods.seq import MIN_CONFIDENCE
from longspec.decoding.round import Models
from longspec.engine.costs import Costs, draft_width
from longspec.errors import UserError
from longspec.models.draft import GlideDraft

# The assumed share of rows that have something to look up, where the host does not know (fused rounds).
ASSUMED_MATCHES = 0.3
# Speculation is used if it promises at least this many times vanilla's speed.
LEAST_SPEED = 1.03
# Contexts whose rounds take equally long, as far as a choice matters: a multiple, and those up to the next.
SAME_CONTEXT = 32
# The longest chain of plain rounds while nothing is measured.
UNMEASURED_GAMMA = 4


class MethodFitter:
    """Fits methods to an engine's models (see `Method.fit`), each once."""

    def __init__(self, models: Models, candidates: tuple[Method, ...]) -> None:
        self._models, self._candidates = models, candidates
        self._fitted: dict[tuple[Method, bool], Method] = {}

    def __call__(self, method: Method, draws: bool = False) -> Method:
        if (method, draws) not in self._fitted:
            width = draft_width(self._candidates, self._models) if method in self._candidates else 0
            fitted = method.fit(self._models, draws, width)
            if self._models.exact:
                _check_exact(fitted)
            self._fitted[method, draws] = fitted
        return self._fitted[method, draws]


def _check_exact(method: Method) -> None:
    """Refuse a tree that is too deep for exact attention; a chain may be longer."""
    from longspec.kernels.exact import DEEPEST

    if DEEPEST < method.depth < method.num_nodes - 1:
        raise UserError(
            f"{method.label} is {method.depth} deep; exact trees have at most {DEEPEST}; lower num_lookup"
        )


class Outlook:
    """How many tokens a sequence accepts compared with an average one, for each source of proposals.

    Each round moves the share of its source by `LEARNS` of the difference to what was observed. The shares of
    sources that are not tried go back to their start by `RETURNS`, so slowly that the new tries cost about 1%
    of the time.
    """

    LEARNS, RETURNS, MOST = 0.1, 0.003, 3.0
    # Fewer drafted tokens are accepted at a temperature: at 0.7 about two thirds of the gain are left.
    COOLS = 0.45

    def __init__(self, temperature: float) -> None:
        self._start = {"draft": max(1 - self.COOLS * temperature, 0.3), "lookup": 1.0}
        self.shares = dict(self._start)
        """By source: the share of the accepted tokens of an average round that this sequence accepts."""

    def learn(self, source: str | None, gained: float, emitted: int) -> None:
        """Note that a round emitted `emitted` tokens, where rounds of its source emit `gained` on average.
        `source` None: nothing was proposed."""
        for one, start in self._start.items():
            if one == source:
                found = min((emitted - 1) / max(gained - 1, 0.01), self.MOST)
                self.shares[one] += self.LEARNS * (found - self.shares[one])
            else:
                self.shares[one] += self.RETURNS * (start - self.shares[one])


def candidates(draft: GlideDraft | None, acceptance: Mapping[str, Any], fused: bool) -> tuple[Method, ...]:
    """The methods that `auto` considers beside vanilla; each class names its own."""
    config = None if draft is None else draft.config
    return tuple(one for cls in methods().values() for one in cls.candidates(config, acceptance, fused))


def unmeasured(draft: GlideDraft | None, fused: bool) -> tuple[Method, ...]:
    """The method that `auto` considers beside vanilla while nothing is measured.

    Plain rounds draft a chain, because on a CPU the default tree's 64 nodes cost more than they gain.
    """
    if draft is None:
        return (Lookup(),)
    if not fused:
        return (Seq(min(UNMEASURED_GAMMA, draft.config.max_lag), min_confidence=MIN_CONFIDENCE),)
    tree = Tree()
    return (replace(tree, tree_shape=tree.tree_shape[: draft.config.max_lag]),)


@dataclass
class Policy:
    """Picks the method that promises the most tokens per second, summed over all rows."""

    methods: tuple[Method, ...]
    acceptance: Mapping[str, Any]
    costs: Costs
    gains: dict[tuple[Method, int | None], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Kept, because every turn asks for all methods, and a turn of a small model takes few milliseconds.
        self._seconds = lru_cache(4096)(self._find_seconds)

    def gain(self, method: Method, run: int | None = None) -> float:
        """Tokens that a round is expected to emit for a row. `run` is how many of the row's last tokens
        occurred before; None if the host does not know it."""
        if (method, run) not in self.gains:
            gain = method.gain(self.acceptance, run)
            if method.source == "lookup" and run is None:
                gain = 1 + ASSUMED_MATCHES * (gain - 1)
            self.gains[method, run] = gain
        return self.gains[method, run]

    def pick(
        self,
        outlooks: Sequence[Outlook],
        runs: Sequence[int] | None,
        num_rows: int,
        context: int,
        max_nodes: int | None = None,
        delays: Mapping[Method, float] = MappingProxyType({}),
    ) -> Method:
        """The method for rows with these outlooks, in a bucket of `num_rows`, of about `context` tokens each.

        `runs` has, for each row, how many of its last tokens occurred before; None if the host does not know.
        If the rounds of a method must be captured first, `delays` has the seconds that this adds to each of
        a row's tokens.
        """
        shares = _shares(outlooks, runs)

        def per_token(method: Method) -> float:
            seconds, num_tokens = self._promise(method, shares, len(outlooks), num_rows, context)
            return seconds / num_tokens + delays.get(method, 0.0) / len(outlooks)

        best: Method = VANILLA
        least = per_token(VANILLA) / LEAST_SPEED
        for method in self.methods:
            if max_nodes is not None and method.num_nodes > max_nodes:
                continue
            if (seconds := per_token(method)) < least:
                best, least = method, seconds
        return best

    def lost(
        self,
        wanted: Method,
        picked: Method,
        outlooks: Sequence[Outlook],
        runs: Sequence[int] | None,
        num_rows: int,
        context: int,
    ) -> float:
        """The seconds by which a round of the `picked` method is expected to take longer than the same tokens
        by the `wanted` one; the rest is as in `pick`."""
        shares = _shares(outlooks, runs)
        taken, num_tokens = self._promise(picked, shares, len(outlooks), num_rows, context)
        seconds, num_wanted = self._promise(wanted, shares, len(outlooks), num_rows, context)
        return taken - num_tokens * seconds / num_wanted

    def _promise(
        self,
        method: Method,
        shares: tuple[float, Mapping[int | None, float]],
        num_running: int,
        num_rows: int,
        context: int,
    ) -> tuple[float, float]:
        """The seconds of a method's round, and the tokens that all rows together are expected to emit."""
        drafted, copied = shares
        if method.source == "lookup":
            gained = sum(share * (self.gain(method, run) - 1) for run, share in copied.items())
        else:
            gained = drafted * (self.gain(method) - 1)
        # A chain goes on as long as one of its rows is sure, so only a row alone ends early.
        share = round(drafted, 2) if num_running == 1 else None
        seconds = self._seconds(method, num_rows, context // SAME_CONTEXT * SAME_CONTEXT, share)
        return seconds, num_running + gained

    def _find_seconds(self, method: Method, num_rows: int, context: int, share: float | None) -> float:
        """The seconds of a method's round. Chains end early for a row alone that accepts this `share`."""
        num_drafted = None if share is None else method.expected_length(self.acceptance, share)
        return self.costs.seconds(method, num_rows, context, num_drafted)

    def learn(self, outlook: Outlook, method: Method, emitted: int, run: int | None) -> None:
        """Update a row's outlook after a round; `run` is as in `pick`."""
        if method.source == "lookup":
            outlook.learn(None if run == 0 else "lookup", self.gain(method, run), emitted)
        else:
            outlook.learn(method.source, self.gain(method), emitted)


def _shares(
    outlooks: Sequence[Outlook], runs: Sequence[int] | None
) -> tuple[float, Mapping[int | None, float]]:
    """The sums of the rows' shares: for drafted tokens, and for looked-up tokens by the run that matched."""
    copied: dict[int | None, float] = {}
    for index, outlook in enumerate(outlooks):
        run = None if runs is None else runs[index]
        copied[run] = copied.get(run, 0.0) + outlook.shares["lookup"]
    return sum(one.shares["draft"] for one in outlooks), copied
