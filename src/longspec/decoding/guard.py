"""Never slower than vanilla: what speculation costs is paid out of what it has won.

And copying before drafting: where the text repeats itself, what followed last time costs nothing to propose.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from longspec.decoding.loop import DecodeState, Method
from longspec.decoding.tree import TokenTree


@dataclass(frozen=True)
class Prices:
    """What a round costs, in vanilla steps, by the nodes of its tree."""

    points: tuple[tuple[int, float], ...]
    """(nodes, cost) as far as it was measured, fewest nodes first; a lone root costs 1."""

    def __call__(self, num_nodes: float) -> float:
        """The cost of a round with so many nodes, or so many on average."""
        return on_line(((1, 1.0), *self.points), num_nodes)


def on_line(points: Sequence[tuple[int, float]], place: float) -> float:
    """The value at `place` on the line through the nearest two of the points, which come in order.

    Before the first point it is that one's; behind the last it never falls.
    """
    if len(points) == 1 or place <= points[0][0]:
        return points[0][1]
    right = next((index for index, (at, _) in enumerate(points) if place <= at), len(points) - 1)
    (left_at, left), (right_at, last) = points[right - 1], points[right]
    slope = (last - left) / (right_at - left_at)
    if place > right_at:
        slope = max(slope, 0.0)
    return last + slope * (place - right_at)


class Account:
    """A row's balance, in vanilla steps: each round brings what it emits and is charged what it cost.

    While there is something in it, rounds speculate; when it is empty they rest. It opens with `START` and
    gets `SHARE` of every token on top, so that what is paused has a chance again and again. So a whole
    answer loses at most START steps, SHARE of its length, and the round that overdrew. Of what is won only
    `MOST` is kept: text that turned bad must not eat up all that good text had won.
    """

    START, SHARE, MOST = 2.0, 0.03, 8.0

    def __init__(self) -> None:
        self.balance = self.START

    @property
    def speculates(self) -> bool:
        """Whether the next round may propose something."""
        return self.balance > 0

    def book(self, emitted: int, cost: float) -> None:
        """A round emitted so much of this row, at this cost."""
        self.balance = min(self.balance + (1 + self.SHARE) * emitted - cost, self.MOST)


class Resting:
    """The target alone, while a method follows what it says and could go on at any round."""

    name = "vanilla"
    num_nodes, depth = 1, 0
    tree_shape: tuple[int, ...] | None = None

    def __init__(self, method: Method) -> None:
        self._method = method
        self.device_key = method.device_key

    def begin(self, state: DecodeState) -> None:
        """See `Method.begin`."""
        self._method.begin(state)

    def follow(self, state: DecodeState) -> None:
        """See `Method.follow`."""
        self._method.follow(state)

    def propose(self, state: DecodeState) -> TokenTree:
        """Nothing but the root."""
        self._method.follow(state)
        return TokenTree.chain(state.roots[:, None])


Copying = tuple[Method, Prices]
"""Prompt lookup, and what its rounds cost."""


class Guarded:
    """A method that rests while it loses; the target goes on alone then, and says the same.

    Each row has an account, and one that is empty is enough to rest: the answers are there when the last one
    is, so others that win do not help a row that loses. A single row is first offered what `copying` finds,
    and the method where that finds nothing.

    Where rounds are replayed, `propose` is never asked: there the rounds of `method` and of `resting` are
    two graphs, and whoever replays them asks the account.
    """

    def __init__(self, method: Method, prices: Prices, copying: Copying | None = None) -> None:
        self.name, self.tree_shape = method.name, method.tree_shape
        self.num_nodes, self.depth = method.num_nodes, method.depth
        self.device_key: tuple[Hashable, ...] | None = method.device_key
        self.method, self._resting = method, Resting(method)
        self._prices, self._copying = prices, copying
        self._accounts: dict[int, Account] = {}
        if copying is not None:
            self.num_nodes = max(self.num_nodes, copying[0].num_nodes)
            self.depth = max(self.depth, copying[0].depth)
        self._last: tuple[int, Prices] | None = None

    @property
    def speculates(self) -> bool:
        """Whether the next round may propose something."""
        return all(account.speculates for account in self._accounts.values())

    def book(self, emitted: Sequence[int], num_nodes: int, prices: Prices | None = None) -> None:
        """Enter a round with so many nodes, by what each row emitted: 0 where it had come to its end."""
        cost, before = (prices or self._prices)(num_nodes), self._accounts
        self._accounts = {row: before.get(row) or Account() for row, count in enumerate(emitted) if count}
        for row, account in self._accounts.items():
            account.book(emitted[row], cost)

    def begin(self, state: DecodeState) -> None:
        """See `Method.begin`."""
        self._last = None
        self.method.begin(state)
        if self._copying is not None:
            self._copying[0].begin(state)

    def follow(self, state: DecodeState) -> None:
        """See `Method.follow`."""
        self.method.follow(state)

    def propose(self, state: DecodeState) -> TokenTree:
        """See `Method.propose`."""
        if self._last is not None:
            counts = zip(state.num_emitted.tolist(), state.rows, strict=True)
            self.book([0 if row.finished else count for count, row in counts], *self._last)
        tree, prices = self._propose(state)
        self._last = tree.num_nodes, prices
        return tree

    def _propose(self, state: DecodeState) -> tuple[TokenTree, Prices]:
        if not self.speculates:
            return self._resting.propose(state), self._prices
        if self._copying is not None and len(state.rows) == 1:
            lookup, prices = self._copying
            tree = lookup.propose(state)
            if tree.num_nodes > 1:
                self.method.follow(state)
                return tree, prices
        return self.method.propose(state), self._prices
