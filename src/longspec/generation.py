"""What a generation returns: the text, its tokens and the figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Generation:
    """One answer. Times are those of the whole batch it ran in."""

    text: str
    token_ids: list[int]
    finish_reason: str
    """"eos", "stop" (a stop string came), "length", "closed" (the stream was closed) or "running"."""
    seed: int
    temperature: float
    """0 is greedy: the seed then has no effect."""
    prompt_tokens: int
    prefilled_tokens: int
    """Prompt tokens that had to be computed, over the whole batch; the rest was in the cache."""
    rounds: int
    tau: float
    accepted_by_depth: list[int]
    depths: list[int]
    """How each token came: drafted at this depth and accepted, or, where it is 0, from the target itself."""
    seconds: float
    prefill_seconds: float
    method: str
    """What most rounds ran."""
    label: str
    """The method with its options, as `bench --methods` takes it: "tree:8x16x16@64+12"."""
    tree_shape: list[int] | None
    """Nodes per depth that the method proposes; None for vanilla."""
    target: str
    draft: str | None
    device: str
    dtype: str
    """What the target computes in."""
    weights: str
    """What its weights are kept in."""

    @property
    def tokens(self) -> int:
        """Tokens kept."""
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the whole time, prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first, over the time after the prefill."""
        decoding = self.seconds - self.prefill_seconds
        return (self.tokens - 1) / decoding if self.tokens > 1 and decoding > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """The object that `longspec generate --json` prints."""
        names = (
            *("text", "tokens", "prompt_tokens", "rounds", "tau", "accepted_by_depth", "seconds"),
            *("tokens_per_second", "method", "label", "tree_shape"),
            *("seed", "finish_reason", "target", "draft", "device", "dtype", "weights"),
        )
        return {name: getattr(self, name) for name in names}
