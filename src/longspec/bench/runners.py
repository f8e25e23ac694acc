"""What answers prompts while it is timed: our methods here, `transformers` in `longspec.bench.hf`."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol, cast

from longspec.api import LongSpec
from longspec.bench.settings import read_method
from longspec.decoding.methods import Method
from longspec.engine.sequence import Sequence
from longspec.options import Options


@dataclass(frozen=True)
class TimedAnswer:
    """One turn's answer and its figures."""

    ran: str
    """The method that answered: what `auto` settled on."""
    token_ids: list[int]
    first_tokens: int
    """How many of them came with the prefill, so that they do not count as decoded."""
    prefill_seconds: float
    decode_seconds: float
    rounds: int | None
    depths: list[int] | None
    """The depth at which each token was drafted, 0 for the target's own; None where it is not known."""
    finish_reason: str


class Runner(Protocol):
    """One line of the comparison."""

    label: str
    same_when_sampled: bool
    """Whether it must emit vanilla's tokens at temperatures above 0 too, because it uses the same noise."""

    def answers(
        self, prompts: Many[list[int]], max_new_tokens: int, temperature: float, seeds: Many[int]
    ) -> list[TimedAnswer]:
        """Answer the prompts side by side. An earlier turn of the same items may still be cached."""
        ...

    def forget(self) -> None: ...


class OurMethod:
    """A decoding method of this package."""

    def __init__(self, model: LongSpec, label: str) -> None:
        self._model, self.label = model, label
        self.choice, self._acceptance = read_method(label)
        self.same_when_sampled = self._acceptance == "coupled"
        if isinstance(self.choice, Method):
            # Raises for a bad size or a missing draft, before anything runs.
            self.choice.fit(model.engine.models)

    def answers(
        self, prompts: Many[list[int]], max_new_tokens: int, temperature: float, seeds: Many[int]
    ) -> list[TimedAnswer]:
        given = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": list(seeds),
            "method": self.choice.name,
            "acceptance": self._acceptance,
            **{name: getattr(self.choice, name) for name in self.choice.options()},
        }
        rule = "" if self.same_when_sampled else f":acceptance={self._acceptance}"
        return [
            TimedAnswer(
                ran=found.label + rule,
                token_ids=found.token_ids,
                first_tokens=1,
                prefill_seconds=found.prefill_seconds,
                decode_seconds=found.seconds - found.prefill_seconds,
                rounds=found.rounds,
                depths=found.depths,
                finish_reason=found.finish_reason,
            )
            for found in self._model.generate(list(prompts), **cast("Options", given))
        ]

    def forget(self) -> None:
        self._model.reset()


def accepted_by_depth(depths: list[int]) -> list[int]:
    """How many rounds kept an accepted token at depth 1, 2, ..."""
    return Sequence([], 1, depths=depths).accepted_by_depth
