"""One row of a decode, as the host sees it: what it has said, and whether it is done."""

from __future__ import annotations

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
    accepted_by_depth: list[int] = field(default_factory=list)
    """How many rounds had an accepted token kept at depth 1, 2, ..."""

    @property
    def finished(self) -> bool:
        """Whether the row is done."""
        return self.finish_reason is not None

    @property
    def tau(self) -> float:
        """Tokens kept per round; the prefill's first token belongs to no round."""
        return (len(self.tokens) - 1) / self.num_rounds if self.num_rounds else 0.0

    def keep_first(self, token: int) -> list[int]:
        """Take the token that the prefill chose."""
        return self._keep((token,))

    def keep_round(self, emitted: Sequence[int]) -> list[int]:
        """Take what a round emitted, accepted tokens then the bonus; returns what was kept of it."""
        kept = self._keep(emitted)
        self.num_rounds += 1
        num_accepted = min(len(kept), len(emitted) - 1)
        self.accepted_by_depth += [0] * (num_accepted - len(self.accepted_by_depth))
        for depth in range(num_accepted):
            self.accepted_by_depth[depth] += 1
        return kept

    def _keep(self, emitted: Sequence[int]) -> list[int]:
        start = len(self.tokens)
        for token in emitted:
            if self.finished:
                break
            self.tokens.append(token)
            stopped = self.stop_after is not None and self.stop_after(token)
            if token in self.eos_ids:
                self.finish_reason = "eos"
            elif stopped:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_new_tokens:
                self.finish_reason = "length"
        return self.tokens[start:]
