"""The base class of the methods that use the draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspec.decoding.methods.base import Method
from longspec.errors import UserError

if TYPE_CHECKING:
    from longspec.decoding.round import Models
    from longspec.decoding.slots import Slots
    from longspec.decoding.tree import TokenTree


@dataclass(frozen=True)
class Drafted(Method):
    """The draft expands a tree of `shape`, level by level; see `longspec.decoding.drafting`."""

    source = "draft"
    uses_draft = True

    num_lookup = 0
    min_confidence = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def num_drafted(self) -> int:
        return sum(self.shape) + 1

    def check_draft(self, models: Models) -> None:
        """Refuse to run without a draft, or deeper than it was trained for."""
        if models.draft is None:
            raise UserError(
                f"method {self.name!r} needs a draft; name one (--draft), or use lookup, which needs none"
            )
        deepest = models.draft.config.max_lag
        if len(self.shape) > deepest:
            raise UserError(
                f"a depth of {len(self.shape)} is asked for, but the draft was trained for {deepest} at most"
            )

    def propose(self, models: Models, rows: Slots, sampled: bool) -> TokenTree:
        from longspec.decoding.drafting import propose

        return propose(self, models, rows, sampled)
