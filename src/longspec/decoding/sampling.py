"""The settings by which `longspec.decoding.choose` chooses tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from longspec.errors import UserError, number
from longspec.option import option

AcceptanceRule = Literal["coupled", "rejection"]


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. The default is greedy.

    Applied in this order, as in `transformers`: repetition penalty, temperature, top-k, top-p, min-p.
    """

    temperature: float = option(0.0, "0 is greedy: the most probable token, whatever the other filters say")
    top_k: int = option(0, "keep only this many of the most probable tokens; 0 keeps all")
    top_p: float = option(1.0, "keep the fewest tokens whose probabilities add up to this; 1 keeps all")
    min_p: float = option(0.0, "keep the tokens at least this fraction as probable as the best; 0 keeps all")
    repetition_penalty: float = option(
        1.0, "above 1, tokens that occurred before (prompt included) become less probable"
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            value = number(field.name, getattr(self, field.name))
            if isinstance(field.default, float):
                # Triton compiles a kernel anew for an int where it had a float.
                object.__setattr__(self, field.name, value)
        if self.temperature < 0:
            raise UserError(f"temperature is {self.temperature}; it must be 0 (greedy) or above")
        if self.top_k < 0 or self.top_k != int(self.top_k):
            raise UserError(f"top_k is {self.top_k}; it must be a whole number, 0 (off) or above")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}; it must be between 0 (off) and 1")
        if self.repetition_penalty <= 0:
            raise UserError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0 (1 is off)")

    @classmethod
    def from_generation_config(cls, values: Mapping[str, Any]) -> Sampling:
        """The settings of a Hugging Face generation config: greedy unless it asks to sample.

        A greedy config's filters are kept, for a request that sets only a temperature.
        """
        given = {
            field.name: values[field.name] for field in fields(cls) if values.get(field.name) is not None
        }
        if not values.get("do_sample"):
            given["temperature"] = 0.0
        if given.get("top_k") == -1:  # some configs write "off" like this
            given["top_k"] = 0
        return cls(**{"temperature": 1.0} | given)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0
