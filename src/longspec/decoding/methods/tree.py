"""The draft's tree: each round drafts several tokens at every depth and verifies the best of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from longspec.config import DEFAULT_TREE
from longspec.decoding.expected import chain_gain, chain_rates, conditional
from longspec.decoding.methods.base import MOST_NODES
from longspec.decoding.methods.drafted import Drafted
from longspec.decoding.methods.registry import register
from longspec.errors import UserError
from longspec.option import option

if TYPE_CHECKING:
    from longspec.config import DraftConfig
    from longspec.decoding.round import Models

# The trees that `auto` considers: nodes, and depth. A larger tree gains more from depth.
TREES = {8: 4, 16: 5, 32: 6, 64: 8}
# In plain rounds (on a CPU) each node costs time; in fused rounds 64 nodes fill one tile of the kernels.
MOST_NODES_PLAIN = 16
# In fused rounds, the trees of `auto` also look up this many tokens.
NUM_LOOKUP = 12
# The chance that all nodes of a depth are wrong is that of a chain's node, divided by their number to this
# power. Measured with drafts of SmolLM2, chains of 4 and trees of 64 nodes: 0.22 to 0.38.
BRANCHING = 0.3


@register
@dataclass(frozen=True)
class Tree(Drafted):
    """Each level keeps the nodes with the best cumulative log-probability.

    For acceptance by rejection (`draws`) that would bias the draw. There each node gets the same number of
    children, and nothing is pruned or looked up.
    """

    name = "tree"
    summary = "the draft's tree"
    sized = ("tree_shape", "max_nodes", "num_lookup")

    tree_shape: tuple[int, ...] = option(DEFAULT_TREE, "nodes per depth", least=1)
    max_nodes: int | None = option(None, "verify only this many of the best nodes, with the root", least=2)
    num_lookup: int = option(
        0, "add a branch of up to this many tokens that followed the same words earlier", least=0, most=64
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_drafted > MOST_NODES:
            raise UserError(
                f"tree_shape {list(self.tree_shape)} has {self.num_drafted} nodes with its root; "
                f"at most {MOST_NODES} are allowed"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tree_shape

    @property
    def num_nodes(self) -> int:
        whole = self.num_drafted + self.num_lookup
        return min(self.max_nodes or whole, whole)

    @property
    def depth(self) -> int:
        return min(max(len(self.tree_shape), self.num_lookup), self.num_nodes - 1)

    @property
    def size(self) -> str:
        kept = f"@{self.max_nodes}" if self.max_nodes else ""
        looked_up = f"+{self.num_lookup}" if self.num_lookup else ""
        return "x".join(map(str, self.tree_shape)) + kept + looked_up

    @classmethod
    def read_size(cls, size: str) -> dict[str, Any]:
        found = re.fullmatch(r"(\d+(?:x\d+)*)?(?:@(\d+))?(?:\+(\d+))?", size)
        if found is None:
            raise UserError(
                f"method 'tree': {size!r} is no size; write tree:4x16x16, tree:8x32x32@64 to verify the best "
                "64 nodes, tree:8x32x32@64+12 to look up to 12 tokens up as well"
            )
        shape, kept, looked_up = found.groups()
        options: dict[str, Any] = {
            "max_nodes": kept and int(kept),
            "num_lookup": looked_up and int(looked_up),
        }
        if shape:
            options["tree_shape"] = tuple(map(int, shape.split("x")))
        return {name: value for name, value in options.items() if value is not None}

    def fit(self, models: Models, draws: bool = False, width: int = 0) -> Self:
        self.check_draft(models)
        if draws:
            shape = _drawn_shape(self.tree_shape)
            fitted = replace(self, tree_shape=shape, max_nodes=None, num_lookup=0, draws=True)
        else:
            assert models.draft is not None
            # The ring takes in at most this many tokens at once.
            fitted = replace(self, num_lookup=min(self.num_lookup, models.draft.config.window - 1))
            if fitted.num_nodes == fitted.num_drafted + fitted.num_lookup:
                fitted = replace(fitted, max_nodes=None)
        return replace(fitted, width=max(width, fitted.depth + 1))

    def gain(self, acceptance: Mapping[str, Any], run: int | None = None) -> float:
        """From the measurement of this tree, or else from those of other trees and of a chain."""
        trees = acceptance.get("trees", {})
        if self.num_lookup:
            if self.key in trees:
                return 1 + sum(trees[self.key])
            drafted = replace(self, num_lookup=0).gain(acceptance)
            return 1 + (drafted - 1) * _lookup_factor(trees)
        measured = self._measured(trees)
        if measured is not None:
            return 1 + sum(measured)
        factor = self._spread ** -_branching(acceptance)
        rates = chain_rates(acceptance, len(self.tree_shape))
        return chain_gain([1 - (1 - rate) * factor for rate in rates])

    def _measured(self, trees: Mapping[str, Sequence[float]]) -> Sequence[float] | None:
        """The measured acceptance by depth of this tree, or of a deeper tree with the same first levels and
        the same number of nodes."""
        depth = len(self.tree_shape)
        for key, accepted in trees.items():
            other = Tree.from_key(key)
            if replace(other, tree_shape=other.tree_shape[:depth]).key == self.key:
                return accepted[:depth]
        return None

    @property
    def key(self) -> str:
        """The tree's name in a draft's table of acceptance: its shape, the number of nodes that are kept if
        not all are, and the number of looked-up tokens if there are any, as in "4,16,16/32+12"."""
        kept = f"/{self.num_nodes}" if self.num_nodes < self.num_drafted + self.num_lookup else ""
        looked_up = f"+{self.num_lookup}" if self.num_lookup else ""
        return ",".join(map(str, self.tree_shape)) + kept + looked_up

    @classmethod
    def from_key(cls, key: str) -> Self:
        """The tree that has this key."""
        rest, _, looked_up = key.partition("+")
        shape, _, kept = rest.partition("/")
        return cls(tuple(map(int, shape.split(","))), int(kept) if kept else None, int(looked_up or 0))

    @property
    def _spread(self) -> float:
        """Verified drafted nodes per depth."""
        return (replace(self, num_lookup=0).num_nodes - 1) / len(self.tree_shape)

    @classmethod
    def candidates(
        cls, draft: DraftConfig | None, acceptance: Mapping[str, Any], fused: bool
    ) -> Iterable[Tree]:
        """The trees that were measured with the draft, and the usual trees for other numbers of nodes."""
        if draft is None:
            return
        deepest = draft.max_lag
        measured = (replace(cls.from_key(key), num_lookup=0) for key in acceptance.get("trees", {}))
        trees = list(dict.fromkeys(measured))
        known = {tree.num_nodes for tree in trees if len(tree.tree_shape) <= deepest}
        trees += [_usual(nodes, min(depth, deepest)) for nodes, depth in TREES.items() if nodes not in known]
        for tree in trees:
            if tree.num_nodes <= (max(TREES) if fused else MOST_NODES_PLAIN) and len(tree.shape) <= deepest:
                yield replace(tree, num_lookup=NUM_LOOKUP if fused else 0)


def _usual(nodes: int, depth: int) -> Tree:
    """The best `nodes` nodes of a wider drafted tree."""
    widths = tuple(min(4 if level == 0 else 16, nodes // 2) for level in range(depth))
    return Tree(widths, nodes)


def _drawn_shape(wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The nodes per depth if each node has the same number of children, at least one."""
    widths = [1]
    for width in wanted:
        widths.append(widths[-1] * max(1, width // widths[-1]))
    return tuple(widths[1:])


def _branching(acceptance: Mapping[str, Any]) -> float:
    """The power that `BRANCHING` assumes, from this draft's own measurements if there are any."""
    found = []
    for key, accepted in acceptance.get("trees", {}).items():
        if (tree := Tree.from_key(key)).num_lookup:
            continue
        spread = tree._spread
        chain = chain_rates(acceptance, len(accepted))
        missed = [len(accepted) - sum(rates) for rates in (chain, conditional(accepted))]
        if "chain" in acceptance and min(missed) > 0 and spread > 1:
            found.append(math.log(missed[0] / missed[1]) / math.log(spread))
    return max(sum(found) / len(found), 0.0) if found else BRANCHING


def _lookup_factor(trees: Mapping[str, Sequence[float]]) -> float:
    """How many times as many tokens a tree accepts with lookup as without: the mean of the trees that were
    measured both ways, and 1 if there are none."""
    found = []
    for key, accepted in trees.items():
        tree = Tree.from_key(key)
        alone = sum(trees.get(replace(tree, num_lookup=0).key, ()))
        if tree.num_lookup and alone:
            found.append(sum(accepted) / alone)
    return sum(found) / len(found) if found else 1.0
