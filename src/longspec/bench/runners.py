"""What answers prompts while it is timed: our methods here, `transformers` in `longspec.bench.hf`."""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Protocol, cast

from longspec.api import LongSpec
from longspec.config import DEFAULT_TREE
from longspec.decoding.methods.make import MethodOptions, make_method
from longspec.engine.sequence import Sequence
from longspec.errors import UserError
from longspec.generation import Generation
from longspec.options import Options, method_options


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
    same_when_sampled: bool
    """Whether it must say what vanilla says at temperatures above 0, too: it draws with the same noise."""

    def answers(self, prompts: Many[list[int]], asked: Many[Asked]) -> list[Answer]:
        """Answer them side by side; what an earlier turn of the same items left in a cache may be used."""
        ...

    def forget(self) -> None:
        """Drop what is cached of earlier items."""
        ...


class OurMethod:
    """A decoding method of this package."""

    def __init__(self, model: LongSpec, label: str) -> None:
        method = read_method(label)
        if method.method != "auto":
            # Raises for a bad size or a missing draft, before anything runs.
            make_method(method, model.engine.models.draft)
        self.label, self.same_when_sampled = label, method.acceptance == "coupled"
        self._model, self._given = model, parse_method(label)

    def _options(self, asked: Many[Asked]) -> Options:
        asking = {
            "max_new_tokens": asked[0].max_new_tokens,
            "temperature": asked[0].temperature,
            "seed": [one.seed for one in asked],
        }
        return cast("Options", self._given | asking)

    def answers(self, prompts: Many[list[int]], asked: Many[Asked]) -> list[Answer]:
        """See `Runner.answers`. They differ in their seeds alone."""
        named = [part for part in self.label.split(":") if "=" in part]
        return [
            Answer(
                ran=":".join([_label_of(found), *named]),
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


def read_method(label: str) -> MethodOptions:
    """What a label of `--methods` means, checked."""
    return method_options(parse_method(label))


def parse_method(label: str) -> dict[str, Any]:
    """The options of a label of `--methods`: a method, its size, and other options by name, between colons.

    lookup:6, seq:4 and magicdec:4 say the chain's length, tree:4x16x16 the nodes per depth; tree:8x32x32@64
    verifies only the best 64 nodes of it, the root counted, and tree:8x32x32@64+12 copies up to 12 tokens.
    magicdec:4:window=256:sinks=8 and tree:acceptance=rejection set options by their names.
    """
    name, *parts = label.split(":")
    method_options({"method": name})  # refuses an unknown one
    given: dict[str, Any] = {"method": name}
    if parts and "=" not in parts[0]:
        given |= _parse_size(label, name, parts.pop(0))
    known = [field.name for field in fields(MethodOptions) if field.name not in ("method", "tree_shape")]
    for part in parts:
        option, _, value = part.partition("=")
        if option not in known:
            raise UserError(
                f"method {label!r}: {part!r} sets no option; write NAME=VALUE, of {', '.join(known)}"
            )
        given[option] = _parse_value(value)
    return given


def _parse_size(label: str, name: str, size: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    size, copies, copied = size.partition("+")
    size, pruned, most = size.partition("@")
    if pruned and (name != "tree" or not most.isdecimal()):
        raise UserError(f"method {label!r}: @ is for trees, with a number of nodes; write tree:8x32x32@64")
    if copies and (name != "tree" or not copied.isdecimal()):
        raise UserError(f"method {label!r}: + is for trees, with a number of tokens; write tree:8x32x32+12")
    given |= {"max_nodes": int(most)} if pruned else {}
    given |= {"num_copied": int(copied)} if copies else {}
    if not size:
        return given
    try:
        numbers = tuple(int(part) for part in size.split("x"))
    except ValueError:
        raise UserError(f"method {label!r}: {size!r} is no size; write lookup:6 or tree:4x16x16") from None
    if name == "tree":
        return given | {"tree_shape": numbers}
    if name not in ("seq", "magicdec", "lookup") or len(numbers) != 1:
        raise UserError(f"method {label!r}: {name} takes no such size; write lookup:6 or tree:4x16x16")
    return given | {"gamma": numbers[0]}


def _parse_value(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def method_label(method: str, gamma: int | None, tree_shape: tuple[int, ...] | None) -> str:
    """The label of a method with its sizes given apart."""
    if method == "tree":
        return "tree:" + "x".join(map(str, tree_shape or DEFAULT_TREE))
    return f"{method}:{gamma}" if gamma is not None and method in ("seq", "magicdec", "lookup") else method


def _label_of(found: Generation) -> str:
    """What `read_method` would read; a chain is told by its length."""
    sizes = tuple(found.tree_shape or ())
    most = f"@{found.max_nodes}" if found.max_nodes else ""
    copied = f"+{found.num_copied}" if found.num_copied else ""
    return method_label(found.method, len(sizes) or None, sizes) + most + copied


def accepted_by_depth(depths: list[int]) -> list[int]:
    """How many rounds kept an accepted token at depth 1, 2, ..."""
    return Sequence([], 1, depths=depths).accepted_by_depth
