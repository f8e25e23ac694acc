"""How many tokens a chain is expected to have accepted: a drafted chain by the table of acceptance that its
draft comes with, a looked-up one by the run of tokens that matched.

In the table, `chain` has the share of rounds in which a greedy chain's token at depth 1, 2, ... was accepted,
and `trees` has the same for trees, by their keys (`Tree.key`).

In answers of SmolLM2 to instructions, programming tasks and passages to summarise, the first looked-up token
was accepted in 0.42 of the cases after a run of 2, 0.7 after 3, 0.8 after 4 and 0.95 after 8, and each
further one in 0.75 to 0.96.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# For a draft that was not measured: the chance that a token of a chain is accepted.
ASSUMED = 0.6
# The shortest and the longest run of tokens that lookup matches.
MIN_RUN, MAX_RUN = 2, 8
# The first looked-up token is accepted with chance 1 - FIRST_DOUBT / run^2, a further one with
# 1 - NEXT_DOUBT / run.
FIRST_DOUBT, NEXT_DOUBT = 2.3, 0.45


def chain_rates(acceptance: Mapping[str, Any], depth: int) -> list[float]:
    """For each depth, the chance that a chain's token is accepted if all tokens before it were."""
    rates = conditional(acceptance.get("chain") or [ASSUMED])
    return (rates + rates[-1:] * depth)[:depth]


def lookup_rates(run: int, depth: int) -> list[float]:
    """As `chain_rates`, for tokens that followed the same `run` of tokens before; 0 if nothing matched."""
    if not run:
        return [0.0] * depth
    return [max(1 - FIRST_DOUBT / run**2, 0.01), *[max(1 - NEXT_DOUBT / run, 0.01)] * (depth - 1)][:depth]


def chain_gain(rates: Sequence[float]) -> float:
    """Tokens that a round emits if its tokens are accepted one after the other with these chances."""
    return 1 + sum(math.prod(rates[: depth + 1]) for depth in range(len(rates)))


def conditional(accepted: Sequence[float]) -> list[float]:
    """From shares of all rounds to chances, given that the depth before was accepted."""
    befores = [1.0, *accepted[:-1]]
    return [now / before if before else 0.0 for now, before in zip(accepted, befores, strict=True)]
