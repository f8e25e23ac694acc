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

# The chains that `auto` considers, and the confidence below which they end: to draft and to verify one more
# token takes longer there than it is expected to save (docs/measurements/cpu.md).
GAMMAS, MIN_CONFIDENCE = (1, 3, 6), 0.6


@register
@dataclass(frozen=True)
class Seq(Chain, Drafted):
    """With `min_confidence`, a chain ends as soon as the draft gives all of its tokens together a lower
    probability.

    Later tokens would rarely be accepted. The doubted token stays, because it is drafted already, and
    because dropping a drawn token would bias the draw.
    """

    name = "seq"
    summary = "the draft's chain"

    min_confidence: float = option(
        0.0, "end the chain when its tokens together have a lower probability; 0: never", least=0, most=1
    )

    def gain(self, acceptance: Mapping[str, Any], run: int | None = None) -> float:
        return chain_gain(chain_rates(acceptance, self.gamma))

    def expected_length(self, acceptance: Mapping[str, Any], share: float) -> float | None:
        """A chain goes on after a token about as often as this token is accepted."""
        if not self.min_confidence:
            return None
        accepted = chain_gain(chain_rates(acceptance, self.gamma - 1)) - 1
        return 1 + min(share, 1.0) * accepted

    @classmethod
    def candidates(
        cls, draft: DraftConfig | None, acceptance: Mapping[str, Any], fused: bool
    ) -> Iterable[Seq]:
        """Only for plain rounds, because in fused ones a chain costs hardly less than a small tree."""
        deepest = 0 if draft is None or fused else draft.max_lag
        gammas = sorted({min(gamma, deepest) for gamma in GAMMAS} - {0})
        return [cls(gamma, min_confidence=MIN_CONFIDENCE) for gamma in gammas]

    def in_full(self) -> Self:
        return replace(self, min_confidence=0.0)

    def fit(self, models: Models, draws: bool = False, width: int = 0) -> Self:
        self.check_draft(models)
        # The host does not see what a fused round drafts, so it cannot end the round early.
        confidence = 0.0 if models.fused else self.min_confidence
        return replace(self, min_confidence=confidence, draws=draws, width=max(width, self.depth + 1))
