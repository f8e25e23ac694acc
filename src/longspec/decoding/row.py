"""One row of a decode, as the host sees it: what it has said, and whether it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Row:
    """A prompt, the tokens kept so far, and the rules for when to stop.

    A token that ends the row is kept; what a round emitted past it is dropped and counts nowhere.
    """

    prompt: list[int]
    seed: int
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_after: Callable[[int], bool] | None = None
    """Told of every kept token; True ends the row there (a stop string is complete)."""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """None while running, then "eos", "stop" or "length"."""
    num_rounds: int = 0
    depths: list[int] = field(default_factory=list)
    """How each token came: drafted at this depth and accepted, or, where it is 0, from the target itself."""

    @property
    def finished(self) -> bool:
        """Whether the row is done."""
        return self.finish_reason is not None

    @property
    def accepted_by_depth(self) -> list[int]:
        """How many rounds had an accepted token kept at depth 1, 2, ..."""
        counts = Counter(self.depths)
        return [counts[depth] for depth in range(1, max(self.depths, default=0) + 1)]

    @property
    def tau(self) -> float:
        """Tokens kept per round; the prefill's first token belongs to no round."""
        return (len(self.tokens) - 1) / self.num_rounds if self.num_rounds else 0.0

    def keep_first(self, token: int) -> list[int]:
        """Take the token that the prefill chose."""
        return self._keep((token,), (0,))

    def keep_round(self, emitted: Sequence[int]) -> list[int]:
        """Take what a round emitted, accepted tokens then the bonus; returns what was kept of it."""
        self.num_rounds += 1
        return self._keep(emitted, (*range(1, len(emitted)), 0))

    def _keep(self, emitted: Sequence[int], depths: Sequence[int]) -> list[int]:
        start = len(self.tokens)
        for token, depth in zip(emitted, depths, strict=True):
            if self.finished:
                break
            self.tokens.append(token)
            self.depths.append(depth)
            stopped = self.stop_after is not None and self.stop_after(token)
            if token in self.eos_ids:
                self.finish_reason = "eos"
            elif stopped:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_new_tokens:
                self.finish_reason = "length"
        return self.tokens[start:]
