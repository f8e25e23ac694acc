"""A prompt and its answer, as the host sees them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from longspec.decoding.accept import AcceptanceRule
from longspec.decoding.methods import Auto, Choice, Method
from longspec.decoding.sampling import Sampling


@dataclass(eq=False)
class Sequence:
    """What was asked for, what has been said, and the rules for when to stop.

    A token that ends the sequence is kept; what a round emitted past it is dropped and counts nowhere.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    eos_ids: frozenset[int] = frozenset()
    method: Choice = field(default_factory=Auto)
    stop_after: Callable[[int], bool] | None = None
    """Told of every kept token; True ends the sequence there (a stop string is complete)."""
    on_news: Callable[[Sequence], object] | None = None
    """Told, by whoever leads the engine, when it has something new, and at its end."""
    acceptance: AcceptanceRule = "coupled"
    """coupled: it says what vanilla says with the same seed; rejection: it keeps the distribution."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """How each token came: drafted at this depth and accepted, or, where it is 0, from the target itself."""
    finish_reason: str | None = None
    """None while it runs, then "eos", "stop", "length" or "closed"."""
    error: BaseException | None = None
    """What stopped the engine while this one ran."""
    num_rounds: int = 0
    num_first: int = 0
    """Tokens that a prefill chose: one, and one more for each time that the sequence was paused."""
    num_shared: int = 0
    """Prompt tokens whose KV was there already, when the sequence was first admitted."""
    num_wanted: int = 0
    """Entries that it needs room for before it goes on, where it was paused."""
    methods: Counter[Method] = field(default_factory=Counter)
    """The rounds of each method that ran."""
    submitted_at: float = 0.0
    first_at: float = 0.0
    """When its first token was there."""
    finished_at: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether it is done."""
        return self.finish_reason is not None

    @property
    def draws(self) -> bool:
        """Whether its nodes are drawn at random: acceptance by rejection needs that, unless it is greedy."""
        return self.acceptance == "rejection" and not self.sampling.greedy

    @property
    def text(self) -> list[int]:
        """The prompt and what has been said."""
        return self.prompt + self.tokens

    @property
    def limit(self) -> int:
        """The length of text at which it ends."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def accepted_by_depth(self) -> list[int]:
        """How many rounds had an accepted token kept at depth 1, 2, ..."""
        counts = Counter(self.depths)
        return [counts[depth] for depth in range(1, max(self.depths, default=0) + 1)]

    @property
    def tau(self) -> float:
        """Tokens kept per round; those that a prefill chose belong to no round."""
        return (len(self.tokens) - self.num_first) / self.num_rounds if self.num_rounds else 0.0

    def keep_first(self, token: int) -> None:
        """Take the token that a prefill chose."""
        if not self.tokens:
            self.first_at = time.perf_counter()
        self.num_first += 1
        self._keep([token])

    def keep_round(self, emitted: list[int], method: Method) -> None:
        """Take what a round emitted, accepted tokens then the bonus."""
        self.num_rounds += 1
        self.methods[method] = self.methods.get(method, 0) + 1
        self._keep(emitted)

    def keep_vanilla(self, emitted: list[int], method: Method) -> None:
        """Take what several vanilla rounds emitted, a token each."""
        if self.stop_after is not None or not self.eos_ids.isdisjoint(emitted):
            for token in emitted:
                if not self.finished:
                    self.keep_round([token], method)
            return
        kept = emitted[: self.max_new_tokens - len(self.tokens)]
        self.num_rounds += len(kept)
        self.methods[method] = self.methods.get(method, 0) + len(kept)
        self.tokens += kept
        self.depths += [0] * len(kept)
        if len(self.tokens) >= self.max_new_tokens:
            self.finish("length")
        elif self.on_news is not None:
            self.on_news(self)

    def _keep(self, emitted: list[int]) -> None:
        """Take tokens as far as none ends the sequence; the last of them is the target's own."""
        last = len(emitted)
        for depth, token in enumerate(emitted, 1):
            self.tokens.append(token)
            self.depths.append(depth if depth < last else 0)
            stopped = self.stop_after is not None and self.stop_after(token)
            if token in self.eos_ids:
                self.finish("eos")
                return
            if stopped:
                self.finish("stop")
                return
            if len(self.tokens) >= self.max_new_tokens:
                self.finish("length")
                return
        if self.on_news is not None:
            self.on_news(self)

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """End here."""
        self.finished_at = time.perf_counter()
        self.error, self.finish_reason = error, reason
        if self.on_news is not None:
            self.on_news(self)
