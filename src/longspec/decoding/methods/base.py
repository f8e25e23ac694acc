"""What a decoding method is: a frozen dataclass whose fields are its options.

Method files import torch only when a round runs, because the command line lists methods and their options
without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from longspec.errors import UserError
from longspec.option import Option, option, options_of

if TYPE_CHECKING:
    from longspec.config import DraftConfig
    from longspec.decoding.round import Models
    from longspec.decoding.slots import Slots
    from longspec.decoding.tree import TokenTree

# The most nodes of one round, with the root. The engine keeps room for them after every text.
MOST_NODES = 512


@dataclass(frozen=True)
class MethodChoice:
    """What a caller may choose to decode with: a method, or `Auto`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """A few words for `--help`."""
    sized: ClassVar[tuple[str, ...]] = ()
    """The options that are part of `size`."""
    _options: ClassVar[Mapping[str, Option]]

    def __init_subclass__(cls) -> None:
        # Keep the cached hash: a dataclass would write its own, and each row of each round asks for it.
        cls.__hash__ = MethodChoice.__hash__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        for one in self.options().values():
            object.__setattr__(self, one.name, one.check(getattr(self, one.name)))

    @classmethod
    def options(cls) -> Mapping[str, Option]:
        """The options by name."""
        if "_options" not in vars(cls):
            cls._options = options_of(cls)
        return cls._options

    @cached_property
    def _hash(self) -> int:
        return hash((type(self), *(getattr(self, one.name) for one in fields(self) if one.compare)))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, because it differs between processes."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @property
    def size(self) -> str:
        """The short form of the sizes, such as 4 in `seq:4`."""
        return ""

    @classmethod
    def read_size(cls, size: str) -> dict[str, Any]:
        """The options that the short form `size` means."""
        raise UserError(f"method {cls.name!r} takes no size, and {size!r} was given")

    @cached_property
    def label(self) -> str:
        """The name and every option that is not the default, as `read_label` reads it."""
        parts = [self.name, self.size]
        for one in self.options().values():
            value = getattr(self, one.name)
            if value != one.default and one.name not in self.sized:
                parts.append(f"{one.name}={one.format(value)}")
        return ":".join(filter(None, parts))


@dataclass(frozen=True)
class Auto(MethodChoice):
    """Let the engine pick the fastest method for each turn, by measurement; see `longspec.engine.auto`."""

    name = "auto"
    summary = "the fastest by measurement"

    max_nodes: int | None = option(None, "verify at most this many nodes", least=2)


@dataclass(frozen=True)
class Method(MethodChoice):
    """A way to propose the next tokens. `longspec.decoding.round` verifies, accepts and commits them.

    A caller's method and the method that runs have the same class: `fit` makes the second from the first.
    """

    source: ClassVar[Literal["draft", "lookup"] | None] = None
    """Where the tokens come from. `auto` learns for each source how many of them a text accepts."""
    uses_draft: ClassVar[bool] = False
    """Whether the draft reads the emitted tokens in each round."""

    draws: bool = field(default=False, kw_only=True)
    """Whether nodes are drawn at random, for acceptance by rejection. Set by `fit`."""
    width: int = field(default=0, kw_only=True)
    """The most tokens that the draft may have to read at a time. Set by `fit`."""

    @property
    def num_nodes(self) -> int:
        """The most nodes of a tree that it proposes, with the root."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """The most tokens that a round may accept."""
        return self.num_nodes - 1

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Nodes per depth; None if that is not known beforehand, or nothing is proposed."""
        return None

    @property
    def drafted_depth(self) -> int:
        """The depth of the drafted nodes; a token that is accepted deeper was looked up."""
        return 0 if self.source == "lookup" else len(self.shape or ())

    @property
    def num_drafted(self) -> int:
        """Nodes that are written behind the draft's ring while a tree is drafted, with the root."""
        return 0

    def gain(self, acceptance: Mapping[str, Any], run: int | None = None) -> float:
        """Tokens that a round is expected to emit, from the draft's measured acceptance (see
        `longspec.decoding.expected`), or from the run of tokens that matched, where it is known."""
        return 1.0

    def expected_length(self, acceptance: Mapping[str, Any], share: float) -> float | None:
        """How many tokens a chain that may end early is expected to have, in a text that accepts this share
        of the tokens that an average text accepts; None if no chain ends early."""
        return None

    @classmethod
    def candidates(
        cls, draft: DraftConfig | None, acceptance: Mapping[str, Any], fused: bool
    ) -> Iterable[Self]:
        """The forms of the method that `auto` should time and consider, for a target with this draft; none by
        default."""
        return ()

    def fit(self, models: Models, draws: bool = False, width: int = 0) -> Self:
        """The method as it runs with these models: what they cannot do is refused or left out.

        `draws` asks for nodes that are drawn at random; `width` is the least value of `self.width`.
        """
        return self

    def in_full(self) -> Self:
        """The same method, but none of its chains ends early. Rounds of this form are timed."""
        return self

    def propose(self, models: Models, rows: Slots, sampled: bool) -> TokenTree:
        """A tree for every row, whose root is the row's newest token. If not `sampled`, all rows are greedy.

        With `models.fused` it must have fixed shapes and read nothing back to the host: it is captured then.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Chain(Method):
    """A method that proposes a chain of tokens."""

    sized = ("gamma",)

    gamma: int = option(4, "length of the chain", least=1, most=MOST_NODES - 1)

    @property
    def num_nodes(self) -> int:
        return self.gamma + 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,) * self.gamma

    @property
    def size(self) -> str:
        return str(self.gamma)

    @classmethod
    def read_size(cls, size: str) -> dict[str, Any]:
        if not size.isdecimal():
            raise UserError(f"method {cls.name!r}: {size!r} is no size; write {cls.name}:4")
        return {"gamma": int(size)}
