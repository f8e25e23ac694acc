"""What chains are expected to have accepted, from the table of acceptance that comes with a draft.

The table: `chain` has the share of the rounds in which a greedy chain's token at depth 1, 2, ... was
accepted, and `trees` has the same for trees, by their keys (`Tree.key`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Of a draft that nobody has measured: each token of a chain is as likely as this to be accepted.
ASSUMED = 0.6


def chain_rates(acceptance: Mapping[str, Any], depth: int) -> list[float]:
    """The chance at each depth that a chain's token is accepted if all before it were."""
    rates = conditional(acceptance.get("chain") or [ASSUMED])
    return (rates + rates[-1:] * depth)[:depth]


def chain_gain(rates: Sequence[float]) -> float:
    """Tokens that a round emits whose tokens are accepted with these chances, one after the other."""
    return 1 + sum(math.prod(rates[: depth + 1]) for depth in range(len(rates)))


def conditional(accepted: Sequence[float]) -> list[float]:
    """Shares of all rounds as chances, given that the depth before was accepted."""
    befores = [1.0, *accepted[:-1]]
    return [now / before if before else 0.0 for now, before in zip(accepted, befores, strict=True)]
