"""A prompt and its answer, as the host sees them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from longspec.decoding.methods import Auto, Method, MethodChoice
from longspec.decoding.sampling import AcceptanceRule, Sampling

Logprobs = tuple[float, list[tuple[int, float]]]
"""For one token: its log-probability, and the most probable tokens at its place with theirs."""


class Constraint(Protocol):
    """Says which tokens may come next, for example only those that continue a JSON value."""

    def fill(self, mask: Tensor, tokens: list[int]) -> None:
        """Set bit t of `mask`, int32 [V / 32] on the host, where token t may follow `tokens`; all bits are 0
        before. Since the last call `tokens` have only grown. An error that this raises ends the sequence."""
        ...


@dataclass(eq=False)
class Sequence:
    """A request, its answer so far, and the rules for when to stop.

    A token that ends the sequence is kept; what a round emitted past it is dropped and counts nowhere.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    eos_ids: frozenset[int] = frozenset()
    method: MethodChoice = field(default_factory=Auto)
    stop_after: Callable[[int], bool] | None = None
    """Called with every kept token; True ends the sequence there (a stop string is complete)."""
    keep_until: Callable[[list[int]], int | None] | None = None
    """Called with all tokens when new ones have come. If it returns a number, the sequence ends, and only so
    many tokens are kept."""
    on_news: Callable[[Sequence], object] | None = None
    """Called by the thread that leads the engine, when there are new tokens and at the end."""
    acceptance: AcceptanceRule = "coupled"
    """coupled: the same tokens as vanilla with the same seed; rejection: the same distribution."""
    constraint: Constraint | None = None
    num_logprobs: int | None = None
    """Return each token's log-probability, and this many of the most probable ones; None: return nothing."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """For each token, the depth at which it was drafted and accepted; 0: it is the target's own choice."""
    copied: list[bool] = field(default_factory=list)
    """For each token, whether it was looked up in the text, and not drafted."""
    logprobs: list[Logprobs] = field(default_factory=list)
    """For each token, if `num_logprobs` is set."""
    finish_reason: str | None = None
    """None while it runs, then "eos", "stop", "length" or "closed"."""
    error: BaseException | None = None
    """The error that ended it."""
    num_rounds: int = 0
    num_first: int = 0
    """Tokens that a prefill chose: one, and one more for each time that the sequence was paused."""
    num_shared: int = 0
    """Prompt tokens whose KV was there already, when the sequence was first admitted."""
    num_wanted: int = 0
    """After a pause: the entries of KV that must fit before it is admitted again."""
    runs: list[tuple[Method, int]] = field(default_factory=list)
    """The methods that ran, in order, each with the number of its rounds."""
    submitted_at: float = 0.0
    first_at: float = 0.0
    """When its first token came."""
    finished_at: float = 0.0

    @property
    def was_paused(self) -> bool:
        return self.num_wanted > 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def draws(self) -> bool:
        """Whether its nodes are drawn at random, as acceptance by rejection needs unless it is greedy."""
        return self.acceptance == "rejection" and not self.sampling.greedy

    @property
    def is_guided(self) -> bool:
        """Whether it returns probabilities or has a constraint. Its rounds are then vanilla
        (`longspec.decoding.guided`)."""
        return self.constraint is not None or self.num_logprobs is not None

    @property
    def text(self) -> list[int]:
        """The prompt and the answer so far."""
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
    def methods(self) -> Counter[Method]:
        """How many rounds each method ran."""
        counts: Counter[Method] = Counter()
        for method, num_rounds in self.runs:
            counts[method] += num_rounds
        return counts

    @property
    def tau(self) -> float:
        """Tokens kept per round; tokens that a prefill chose do not count."""
        return (len(self.tokens) - self.num_first) / self.num_rounds if self.num_rounds else 0.0

    def keep_first(self, token: int) -> None:
        self.num_first += 1
        self._keep([token], 0)

    def keep_round(self, emitted: list[int], method: Method) -> None:
        """Take the tokens that a round emitted: the accepted ones, then the bonus."""
        self.num_rounds += 1
        self._count(method, 1)
        self._keep(emitted, method.drafted_depth)

    def keep_scores(self, scores: list[float]) -> None:
        """Note the log-probabilities of the next token, in the form that `run_guided` returns."""
        if self.num_logprobs is None:
            return
        size = (len(scores) - 1) // 2
        top = zip(scores[1 : 1 + self.num_logprobs], scores[1 + size :], strict=False)
        self.logprobs.append((scores[0], [(int(token), value) for token, value in top]))

    def keep_vanilla(self, emitted: list[int], method: Method) -> None:
        """Take the tokens of several vanilla rounds, one token each."""
        if self.stop_after is not None or not self.eos_ids.isdisjoint(emitted):
            for token in emitted:
                if not self.finished:
                    self.keep_round([token], method)
            return
        kept = emitted[: self.max_new_tokens - len(self.tokens)]
        self.num_rounds += len(kept)
        self._count(method, len(kept))
        self.tokens += kept
        self.depths += [0] * len(kept)
        self.copied += [False] * len(kept)
        if self._drop_rest():
            self.finish("stop")
        elif len(self.tokens) >= self.max_new_tokens:
            self.finish("length")
        elif self.on_news is not None:
            self.on_news(self)

    def _drop_rest(self) -> bool:
        """Drop the tokens that `keep_until` does not keep; returns whether it ends the sequence."""
        end = None if self.keep_until is None else self.keep_until(self.tokens)
        if end is not None:
            del self.tokens[end:], self.depths[end:], self.copied[end:], self.logprobs[end:]
        return end is not None

    def _count(self, method: Method, num_rounds: int) -> None:
        # Compare by identity, because this runs for every row of every round.
        if self.runs and self.runs[-1][0] is method:
            num_rounds += self.runs.pop()[1]
        self.runs.append((method, num_rounds))

    def _keep(self, emitted: list[int], drafted_depth: int) -> None:
        """Take tokens up to one that ends the sequence. The last of `emitted` is the target's own choice; an
        accepted token deeper than `drafted_depth` was looked up."""
        last = len(emitted)
        if not self.tokens:
            self.first_at = time.perf_counter()
        for depth, token in enumerate(emitted, 1):
            self.tokens.append(token)
            self.depths.append(depth if depth < last else 0)
            self.copied.append(drafted_depth < depth < last)
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
        if self._drop_rest():
            self.finish("stop")
        elif self.on_news is not None:
            self.on_news(self)

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        self.finished_at = time.perf_counter()
        self.error, self.finish_reason = error, reason
        if self.on_news is not None:
            self.on_news(self)
