"""The draft's chain: each round drafts gamma tokens one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from longspec.decoding.expected import chain_gain, chain_rates
from longspec.decoding.methods.base import Chain
from longspec.decoding.methods.drafted import Drafted
from longspec.decoding.methods.registry import register
from longspec.option import option

if TYPE_CHECKING:
    from longspec.config import DraftConfig
    from longspec.decoding.round import Models

# The chains that `auto` considers, and the confidence below which they end, to save a pass of the draft.
GAMMAS, MIN_CONFIDENCE = (1, 2, 3, 4, 6), 0.2


@register
@dataclass(frozen=True)
class Seq(Chain, Drafted):
    """With `min_confidence`, a chain ends after the first token to which the draft gives a lower probability.

    Later tokens would hardly ever be accepted. The doubted token stays, because it is drafted already, and
    because dropping a drawn token would bias the draw.
    """

    name = "seq"
    summary = "the draft's chain"

    min_confidence: float = option(
        0.0, "end the chain after a token with a lower probability; 0: never", least=0, most=1
    )

    def gain(self, acceptance: Mapping[str, Any]) -> float:
        return chain_gain(chain_rates(acceptance, self.gamma))

    @classmethod
    def candidates(
        cls, draft: DraftConfig | None, acceptance: Mapping[str, Any], fused: bool
    ) -> Iterable[Seq]:
        """Only for plain rounds, because in fused ones a chain costs hardly less than a small tree."""
        deepest = 0 if draft is None or fused else draft.max_lag
        return [cls(gamma, min_confidence=MIN_CONFIDENCE) for gamma in GAMMAS if gamma <= deepest]

    def in_full(self) -> Self:
        return replace(self, min_confidence=0.0)

    def fit(self, models: Models, draws: bool = False, width: int = 0) -> Self:
        self.check_draft(models)
        # The host does not see what a fused round drafts, so it cannot end the round early.
        confidence = 0.0 if models.fused else self.min_confidence
        return replace(self, min_confidence=confidence, draws=draws, width=max(width, self.depth + 1))
