"""How many tokens a chain is expected to have accepted, from the table of acceptance that a draft comes with.

In the table, `chain` has the share of rounds in which a greedy chain's token at depth 1, 2, ... was accepted,
and `trees` has the same for trees, by their keys (`Tree.key`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# For a draft that was not measured: the chance that a token of a chain is accepted.
ASSUMED = 0.6


def chain_rates(acceptance: Mapping[str, Any], depth: int) -> list[float]:
    """For each depth, the chance that a chain's token is accepted if all tokens before it were."""
    rates = conditional(acceptance.get("chain") or [ASSUMED])
    return (rates + rates[-1:] * depth)[:depth]


def chain_gain(rates: Sequence[float]) -> float:
    """Tokens that a round emits if its tokens are accepted one after the other with these chances."""
    return 1 + sum(math.prod(rates[: depth + 1]) for depth in range(len(rates)))


def conditional(accepted: Sequence[float]) -> list[float]:
    """From shares of all rounds to chances, given that the depth before was accepted."""
    befores = [1.0, *accepted[:-1]]
    return [now / before if before else 0.0 for now, before in zip(accepted, befores, strict=True)]
