"""Whoever answers a prompt under the clock: our methods here, `transformers` in `longspec.bench.hf`."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol, cast

from longspec.api import LongSpec
from longspec.decoding.methods import Method
from longspec.decoding.methods.registry import read_label
from longspec.engine.sequence import Sequence
from longspec.options import Options


@dataclass(frozen=True)
class Asked:
    """How an answer is to be made."""

    max_new_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answer:
    """One turn's answer and its figures."""

    ran: str
    """The method that answered: what `auto` settled on."""
    token_ids: list[int]
    first_tokens: int
    """How many of them came with the prefill, and so do not count as decoded."""
    prefill_seconds: float
    decode_seconds: float
    rounds: int | None
    depths: list[int] | None
    """How each token came; None where that is not known."""
    finish_reason: str


class Runner(Protocol):
    """One line of the comparison."""

    label: str

    def answers(self, prompts: Many[list[int]], asked: Many[Asked]) -> list[Answer]:
        """Answer them side by side; what an earlier turn of the same items left in a cache may be used."""
        ...

    def forget(self) -> None:
        """Let go of everything that belongs to an earlier item."""
        ...


class OurMethod:
    """A decoding method of this package."""

    def __init__(self, model: LongSpec, label: str) -> None:
        self.label = label
        self._model = model
        self._choice = read_label(label)
        if isinstance(self._choice, Method):
            self._choice.fit(model.engine.models)  # refuses what cannot run, before all else

    def _options(self, asked: Many[Asked]) -> Options:
        given = {
            "max_new_tokens": asked[0].max_new_tokens,
            "temperature": asked[0].temperature,
            "seed": [one.seed for one in asked],
            "method": self._choice.name,
            **{name: getattr(self._choice, name) for name in self._choice.options()},
        }
        return cast("Options", given)

    def answers(self, prompts: Many[list[int]], asked: Many[Asked]) -> list[Answer]:
        """See `Runner.answers`. They differ in their seeds alone."""
        return [
            Answer(
                ran=found.label,
                token_ids=found.token_ids,
                first_tokens=1,
                prefill_seconds=found.prefill_seconds,
                decode_seconds=found.seconds - found.prefill_seconds,
                rounds=found.rounds,
                depths=found.depths,
                finish_reason=found.finish_reason,
            )
            for found in self._model.generate(list(prompts), **self._options(asked))
        ]

    def forget(self) -> None:
        """See `Runner.forget`."""
        self._model.reset()


def accepted_by_depth(depths: list[int]) -> list[int]:
    """How many rounds kept an accepted token at depth 1, 2, ..."""
    return Sequence([], 1, depths=depths).accepted_by_depth
