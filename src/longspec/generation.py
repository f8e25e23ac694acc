"""The result of a generation: the text, its tokens and the figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Generation:
    """One answer. Times are from the submission of its prompt."""

    text: str
    token_ids: list[int]
    finish_reason: str
    """"eos", "stop" (a stop string came), "length", "closed" (the stream was closed) or "running"."""
    seed: int
    temperature: float
    """0 is greedy; then the seed has no effect."""
    prompt_tokens: int
    prefilled_tokens: int
    """Prompt tokens that were computed; the KV of the others was in the cache."""
    rounds: int
    tau: float
    accepted_by_depth: list[int]
    depths: list[int]
    """The depth at which each token was drafted; 0 if it is the target's own."""
    seconds: float
    prefill_seconds: float
    method: str
    """The method of most rounds."""
    label: str
    """The method with its options, as for `bench --methods`: "tree:8x16x16@64+12"."""
    tree_shape: list[int] | None
    """Nodes per depth that the method proposes; None for vanilla."""
    target: str
    draft: str | None
    device: str
    dtype: str
    """What the target computes in."""
    weights: str
    """What its weights are kept in."""
    kv_dtype: str
    """What its keys and values are kept in."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """All tokens over the whole time, with the prefill."""
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
            *("seed", "finish_reason", "target", "draft", "device", "dtype", "weights", "kv_dtype"),
        )
        return {name: getattr(self, name) for name in names}
