"""From what the user asks for to a method that runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longspec.config import DEFAULT_TREE
from longspec.decoding.methods.glide import Glide
from longspec.decoding.methods.lookup import Lookup
from longspec.decoding.methods.magicdec import MagicDec
from longspec.decoding.methods.vanilla import Vanilla
from longspec.decoding.round import Method
from longspec.errors import UserError
from longspec.models.draft import GlideDraft

METHODS = ("auto", "vanilla", "seq", "tree", "magicdec", "lookup")
ACCEPTANCES = ("coupled", "rejection")
MOST_NODES = 512
MOST_COPIED = 64
MOST_NGRAM = 16


@dataclass(frozen=True)
class MethodOptions:
    """A method and its sizes; those that do not concern it are ignored."""

    method: str = "auto"
    gamma: int = 4
    """Chain length of seq, magicdec and lookup."""
    tree_shape: tuple[int, ...] = DEFAULT_TREE
    """Nodes per depth of tree."""
    max_nodes: int | None = None
    """Keep only the best nodes of a drafted tree, the root counted; None keeps all."""
    num_copied: int = 0
    """With tree: a branch of so many tokens at most is copied from where the text said the same before."""
    acceptance: str = "coupled"
    sinks: int = 4
    window: int = 512
    """What magicdec's draft sees of the prefix: its first and its last entries."""
    min_confidence: float = 0.0
    """seq ends its chain behind the first token to which the draft gives less than this; 0 never does."""
    max_ngram: int = 3
    """Longest run of tokens that lookup matches."""

    @property
    def drafted_depth(self) -> int:
        """How deep drafting goes; what is proposed deeper was looked up."""
        depths = {"vanilla": 0, "lookup": 0, "tree": len(self.tree_shape)}
        return depths.get(self.method, self.gamma)

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(vars(self).values()))

    def __hash__(self) -> int:
        return self._hash  # asked for each row of each round

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"method {self.method!r} is unknown; there are: {', '.join(METHODS)}")
        if self.acceptance not in ACCEPTANCES:
            raise UserError(f"acceptance {self.acceptance!r} is unknown; there are: {', '.join(ACCEPTANCES)}")
        if not 1 <= self.gamma < MOST_NODES:
            raise UserError(f"gamma is {self.gamma}; it must lie between 1 and {MOST_NODES - 1}")
        if not self.tree_shape or min(self.tree_shape) < 1:
            raise UserError(
                f"tree_shape is {list(self.tree_shape)}; give at least one depth, each of at least one node"
            )
        if sum(self.tree_shape) >= MOST_NODES:
            raise UserError(
                f"tree_shape {list(self.tree_shape)} has {sum(self.tree_shape) + 1} nodes with its root; "
                f"at most {MOST_NODES} are allowed"
            )
        if self.max_nodes is not None and self.max_nodes < 2:
            raise UserError(f"max_nodes is {self.max_nodes}; it must be at least 2: the root and one more")
        if not 0 <= self.num_copied <= MOST_COPIED:
            raise UserError(
                f"num_copied is {self.num_copied}; it must be 0 (nothing is copied) to {MOST_COPIED}"
            )
        if not 0 <= self.min_confidence < 1:
            raise UserError(
                f"min_confidence is {self.min_confidence}; it must be 0 (a chain is never ended) or above, "
                "and less than 1"
            )
        if self.sinks < 0:
            raise UserError(f"sinks is {self.sinks}; it must be 0 or more")
        if self.window < 1:
            raise UserError(f"window is {self.window}; it must be at least 1")
        if not 1 <= self.max_ngram <= MOST_NGRAM:
            raise UserError(f"max_ngram is {self.max_ngram}; it must lie between 1 and {MOST_NGRAM}")


def make_method(
    options: MethodOptions, draft: GlideDraft | None, draws: bool = False, on_cpu: bool = True, width: int = 0
) -> Method:
    """The method, "auto" settled before. `draws` is for acceptance by rejection; `width` as for `Glide`."""
    if options.method == "vanilla":
        return Vanilla()
    if options.method == "lookup":
        return Lookup(options.gamma, options.max_ngram, min(2, options.max_ngram))
    if options.method == "magicdec":
        return MagicDec(options.gamma, options.sinks, options.window, draws)
    assert options.method in ("seq", "tree"), options.method
    if draft is None:
        raise UserError(
            f"method {options.method!r} needs a draft; name one (--draft), or use lookup, which needs none"
        )
    chain = options.method == "seq"
    shape = (1,) * options.gamma if chain else options.tree_shape
    limit = draft.config.max_lag
    if len(shape) > limit:
        raise UserError(
            f"a depth of {len(shape)} is asked for, but the draft was trained to draft {limit} deep"
        )
    return Glide(
        draft,
        shape,
        options.max_nodes,
        draws,
        options.method,
        # Between rounds of a GPU nobody looks at what was drafted.
        options.min_confidence if chain and on_cpu else 0.0,
        0 if chain else options.num_copied,
        width,
    )
