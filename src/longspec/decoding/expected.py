"""What a round of a method is expected to emit, from the acceptance that was measured of its draft.

The table that comes with a draft: `chain` has the share of the rounds in which a greedy chain's token at
depth 1, 2, ... was accepted, and `trees` has the same for trees, by the names that `tree_name` gives. What
was not measured is derived from what was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from longspec.decoding.methods.make import MethodOptions

# Of a draft that nobody has measured: each token of a chain is as likely as this to be accepted.
ASSUMED = 0.6
# The chance that all nodes of a depth are wrong falls with their number to this power: 0.22 to 0.38 in drafts
# of SmolLM2 whose chains of 4 and trees of 64 nodes were both measured.
BRANCHING = 0.3

# Of the tokens that are not accepted, so many the draft itself doubts.
SEEN_COMING = 0.5


def num_nodes(options: MethodOptions) -> int:
    """Most nodes of a round, the root counted."""
    if options.method != "tree":
        return options.gamma + 1
    whole = sum(options.tree_shape) + 1 + options.num_copied
    return min(options.max_nodes or whole, whole)


def tree_name(options: MethodOptions) -> str:
    """How a tree is filed: its shape, and the nodes kept of it where not all are: "4,16,16/32"."""
    kept = "" if num_nodes(options) > sum(options.tree_shape) else f"/{num_nodes(options)}"
    return ",".join(map(str, options.tree_shape)) + kept


def tree_named(name: str) -> MethodOptions:
    """The tree that `tree_name` calls so."""
    shape, _, kept = name.partition("/")
    sizes = tuple(map(int, shape.split(",")))
    return MethodOptions("tree", tree_shape=sizes, max_nodes=int(kept) if kept else None)


def gain(options: MethodOptions, acceptance: Mapping[str, Any]) -> float:
    """Tokens that a round is expected to emit."""
    if options.method == "tree":
        measured = _measured(options, acceptance.get("trees", {}))
        if measured is not None:
            return 1 + sum(measured)
    rates = chain_rates(acceptance, _depth(options))
    if options.method == "tree":
        factor = _spread(options) ** -_branching(acceptance)
        rates = [1 - (1 - rate) * factor for rate in rates]
    return 1 + sum(math.prod(rates[: depth + 1]) for depth in range(len(rates)))


def chain_rates(acceptance: Mapping[str, Any], depth: int) -> list[float]:
    """The chance at each depth that a chain's token is accepted if all before it were."""
    rates = _rates(acceptance.get("chain") or [ASSUMED])
    return (rates + rates[-1:] * depth)[:depth]


def chain_length(options: MethodOptions, acceptance: Mapping[str, Any], num_rows: int = 1) -> float:
    """Tokens that a chain is expected to draft, of at most gamma, where doubt in all rows ends it."""
    if not options.min_confidence:
        return options.gamma
    goes_on = [1 - SEEN_COMING * (1 - rate) for rate in chain_rates(acceptance, options.gamma)]
    one_row = [math.prod(goes_on[:depth]) for depth in range(options.gamma)]
    return sum(1 - (1 - chance) ** num_rows for chance in one_row)


def _rates(accepted: Sequence[float]) -> list[float]:
    """By depth, given the depth before."""
    befores = [1.0, *accepted[:-1]]
    return [now / before if before else 0.0 for now, before in zip(accepted, befores, strict=True)]


def _measured(options: MethodOptions, trees: Mapping[str, Sequence[float]]) -> Sequence[float] | None:
    """Of the tree itself, or of a deeper one that begins like it and keeps as many nodes."""
    depth = len(options.tree_shape)
    for name, accepted in trees.items():
        other = tree_named(name)
        if tree_name(replace(other, tree_shape=other.tree_shape[:depth])) == tree_name(options):
            return accepted[:depth]
    return None


def _branching(acceptance: Mapping[str, Any]) -> float:
    """The power of `BRANCHING`, of this draft where its trees tell."""
    found = []
    for name, accepted in acceptance.get("trees", {}).items():
        options = tree_named(name)
        chain = chain_rates(acceptance, len(accepted))
        missed = [len(accepted) - sum(rates) for rates in (chain, _rates(accepted))]
        if "chain" in acceptance and min(missed) > 0 and _spread(options) > 1:
            found.append(math.log(missed[0] / missed[1]) / math.log(_spread(options)))
    return max(sum(found) / len(found), 0.0) if found else BRANCHING


def _depth(options: MethodOptions) -> int:
    return len(options.tree_shape) if options.method == "tree" else options.gamma


def _spread(options: MethodOptions) -> float:
    """Drafted nodes per depth."""
    return (num_nodes(replace(options, num_copied=0)) - 1) / _depth(options)
