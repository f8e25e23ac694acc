"""The options of `generate` and `stream`, and their checks."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, get_args

from longspec.decoding.methods import Auto, MethodChoice
from longspec.decoding.methods.registry import all_options, choose_method
from longspec.decoding.sampling import AcceptanceRule, Sampling
from longspec.errors import UserError, check_known, entry, flag, whole_number, whole_numbers

DEFAULT_MAX_NEW_TOKENS = 512
_RULES: dict[str, AcceptanceRule] = {rule: rule for rule in get_args(AcceptanceRule)}


class Options(TypedDict, total=False):
    """What `generate` and `stream` take besides the prompt. Defaults come from the model's config."""

    max_new_tokens: int | None
    """None: as many as fit, at most 512."""
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | Sequence[int] | None
    """One per row, or a single one: then row i gets `seed + i`. None draws one; the result has it."""
    stop: str | Sequence[str] | None
    """Strings that end an answer; they are not part of it."""
    eos_ids: Sequence[int] | None
    """Tokens that end an answer, instead of the model's own. If empty, only the length ends it."""
    raw: bool
    """Whether to use texts without the chat template."""
    acceptance: str
    """coupled: the same tokens as vanilla with the same seed; rejection: the same distribution."""
    method: str
    """auto, vanilla, seq, tree, magicdec, lookup, or another registered one. The options below belong to some
    of the methods and are described in their classes. Options of your own methods work too."""
    gamma: int
    tree_shape: Sequence[int]
    max_nodes: int | None
    num_lookup: int
    min_confidence: float
    sinks: int
    window: int
    max_ngram: int


@dataclass(frozen=True)
class Settings:
    """Options, checked as far as possible without a model."""

    sampling: dict[str, Any]
    """Only those that were given; the others come from the model."""
    method: MethodChoice
    acceptance: AcceptanceRule
    max_new_tokens: int | None
    seed: int | list[int] | None
    stop: tuple[str, ...]
    eos_ids: frozenset[int] | None
    raw: bool


def read_options(options: Mapping[str, Any]) -> Settings:
    """Check the options; a bad one is refused by name."""
    known = [*dict.fromkeys((*Options.__annotations__, *all_options()))]
    for name in options:
        check_known("option", name, known)
    given = {name: value for name, value in options.items() if value is not None}
    names = [field.name for field in fields(Sampling)]
    sampling = {name: given[name] for name in names if name in given}
    Sampling(**sampling)
    max_new_tokens = given.get("max_new_tokens")
    if max_new_tokens is not None and (max_new_tokens := whole_number("max_new_tokens", max_new_tokens)) < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    return Settings(
        sampling=sampling,
        method=choose_method(
            given.get("method", Auto.name), {name: given[name] for name in all_options() if name in given}
        ),
        acceptance=entry("acceptance", given.get("acceptance", "coupled"), _RULES),
        max_new_tokens=max_new_tokens,
        seed=_checked_seed(given.get("seed")),
        stop=_stop_strings(given.get("stop", ())),
        eos_ids=frozenset(whole_numbers("eos_ids", given["eos_ids"])) if "eos_ids" in given else None,
        raw=flag("raw", given.get("raw", False)),
    )


def room_for(max_length: int, num_prompt: int, wanted: int | None) -> int:
    """How many tokens a row may add."""
    room = max_length - num_prompt
    if room < 1:
        raise UserError(
            f"the prompt has {num_prompt} tokens, but the context holds {max_length} with the answer; "
            f"shorten it to at most {max_length - 1} tokens"
        )
    if wanted is None:
        return min(room, DEFAULT_MAX_NEW_TOKENS)
    if wanted > room:
        raise UserError(
            f"max_new_tokens {wanted} does not fit: the context holds {max_length} tokens and the prompt "
            f"takes {num_prompt}, so at most {room} new tokens fit"
        )
    return wanted


def _checked_seed(seed: Any) -> int | list[int] | None:
    if seed is None:
        return None
    several = isinstance(seed, Sequence) or getattr(seed, "ndim", 0) > 0
    seeds = whole_numbers("seed", seed) if several else [whole_number("seed", seed)]
    wrong = next((one for one in seeds if not 0 <= one < 2**63), None)
    if wrong is not None:
        raise UserError(f"seed {wrong} must be between 0 and 2**63 - 1")
    return seeds if several else seeds[0]


def seeds_for(seed: int | list[int] | None, num_rows: int) -> list[int]:
    """A seed for each row; None draws the first one."""
    if seed is None:
        seed = secrets.randbits(31)
    seeds = [(seed + row) % 2**63 for row in range(num_rows)] if isinstance(seed, int) else seed
    if len(seeds) != num_rows:
        raise UserError(f"{len(seeds)} seeds for {num_rows} prompts; give one each, or a single one")
    return seeds


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) or not isinstance(stop, Sequence) else tuple(stop)
    if not all(isinstance(one, str) for one in strings):
        raise UserError(f"stop is {stop!r}; a text or a list of texts is needed")
    if not all(strings):
        raise UserError("a stop string is empty; it would stop every answer at once")
    return strings
