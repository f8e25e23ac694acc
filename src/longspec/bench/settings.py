"""What the benchmarks can be asked for. No torch here, because `--help` reads these classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longspec.decoding.methods.base import Auto, MethodChoice
from longspec.decoding.methods.registry import read_label
from longspec.errors import UserError
from longspec.option import check_options, option


@dataclass(frozen=True)
class RunSetting:
    """What a benchmark does with its workloads."""

    methods: Sequence[str]
    """The labels of `--methods`; vanilla is always measured."""
    temperatures: tuple[float, ...] = option((0.0,), "one or more", least=0, metavar="T,T,...")
    repeats: int = option(3, "how often each answer is timed", least=1)
    max_new_tokens: int = option(64, "longest answer", least=2)
    limit: int | None = option(None, "only the first N prompts of each kind", least=1)
    batch: int = option(1, "answer N prompts of a kind at once", least=1)

    def __post_init__(self) -> None:
        check_options(self)
        if not self.methods:
            raise UserError("there are no methods; name one or more, such as auto,lookup")
        for label in self.methods:
            read_method(label)

    @property
    def uses_auto(self) -> bool:
        return any(isinstance(read_method(label)[0], Auto) for label in self.methods)

    @property
    def labels(self) -> list[str]:
        """The methods, each once; vanilla first, because the others are compared with it."""
        return list(dict.fromkeys(("vanilla", *self.methods)))


@dataclass(frozen=True)
class LoadSetting:
    """What is sent to the engine."""

    requests: int = option(64, "at each rate; prompts are repeated as often as it takes", least=1)
    rates: tuple[float, ...] | None = option(
        None, "requests per second, one after the other", metavar="R,R,..."
    )
    shares: tuple[float, ...] | None = option(
        None,
        "the same, as shares of the throughput when all requests come at once, which is measured first "
        "(default: 0.3,0.6,0.9)",
        metavar="S,S,...",
    )
    max_new_tokens: int = option(64, "longest answer", least=1)
    method: str = option("auto", "as one of bench generate's --methods")
    temperature: float = option(0.0, "0 is greedy", least=0)
    seed: int = option(0, "of arrivals; the answer to request i has seed + i", least=0, most=2**32 - 1)

    def __post_init__(self) -> None:
        check_options(self)
        read_label(self.method)
        if self.rates and self.shares:
            raise UserError("give rates, or shares of the throughput, and not both")
        if not self.rates and not self.shares:
            object.__setattr__(self, "shares", (0.3, 0.6, 0.9))
        for name, values in (("rates", self.rates), ("shares", self.shares)):
            if not all(one > 0 for one in values or ()):
                raise UserError(f"{name} are {list(values or ())}; each must be above 0")

    @property
    def uses_auto(self) -> bool:
        return isinstance(read_label(self.method), Auto)


def read_method(label: str) -> tuple[MethodChoice, str]:
    """What a label of `--methods` means: a method with its options, and how its tokens are accepted.

    lookup:6, tree:8x32x32@64+12, magicdec:4:window=256, and tree:acceptance=rejection.
    """
    from longspec.options import read_options

    named = [part for part in label.split(":") if part.startswith("acceptance=")]
    choice = read_label(":".join(part for part in label.split(":") if part not in named))
    acceptance = named[-1].removeprefix("acceptance=") if named else "coupled"
    read_options({"acceptance": acceptance})  # refuses an unknown one
    return choice, acceptance
