"""Heads of functions with a docstring, to be completed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from longspec.data.prompts import small
from longspec.data.prompts.library import Library
from longspec.data.prompts.wordings import wordings, words

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_IMPORTS = ("", "", "", "from typing import List\n\n\n", "import math\n\n\n")
# How an example is written: as a session, as an equation, with an arrow, in words.
_STYLES = ("session", "session", "session", "equation", "arrow", "words")


def function_heads(rng: Random, library: Library) -> dict[str, Any]:
    """A small one with examples, or one of the library's sources."""
    asked = rng.choice(wordings("functions", "asked"))
    if library.has_sources and rng.random() < 0.4:
        return {"prompt": asked.replace("{}", library.function(rng).head)}
    return {"prompt": asked.replace("{}", _head(rng))}


@cache
def _functions() -> tuple[Callable[..., Any], ...]:
    found = vars(small).values()
    return tuple(one for one in found if inspect.isfunction(one) and one.__module__ == small.__name__)


def _head(rng: Random) -> str:
    function = rng.choice(_functions())
    name, signature = function.__name__, inspect.signature(function)
    typed, mark, style = rng.random() < 0.6, rng.choice(('"""', '"""', "'''")), rng.choice(_STYLES)
    lines = [f"def {name}{_written(signature) if typed else '(' + ', '.join(signature.parameters) + ')'}:"]
    about = inspect.cleandoc(function.__doc__ or "").splitlines()
    lines.append(f"    {mark}{rng.choice(('', ' '))}{rng.choice(about)}")
    if style in ("equation", "words"):
        kinds = [f"        {one.name} ({one.annotation})" for one in signature.parameters.values()]
        lines += ["", "    Args:", *kinds]
    if style != "session":
        lines += ["", rng.choice(("    Examples:", "    For example:", "    Example"))]
    for _ in range(rng.randint(1, 3)):
        values = [_draw(argument, rng) for argument in signature.parameters]
        lines += _example(style, f"{name}({', '.join(map(repr, values))})", repr(function(*values)))
    return rng.choice(_IMPORTS) + "\n".join([*lines, f"    {mark}"])


def _written(signature: inspect.Signature) -> str:
    given = ", ".join(f"{one.name}: {one.annotation}" for one in signature.parameters.values())
    return f"({given}) -> {signature.return_annotation}"


def _example(style: str, call: str, found: str) -> list[str]:
    if style == "session":
        return [f"    >>> {call}", f"    {found}"]
    if style == "equation":
        return [f"        {call} == {found}"]
    return [f"    {call} -> {found}" if style == "arrow" else f"    * {call} returns {found}"]


def _draw(argument: str, rng: Random) -> Any:
    number = rng.randint(3, 7)
    names = [name.lower() for name in words("names")]
    made: dict[str, Callable[[], Any]] = {
        "n": lambda: rng.randint(1, 30),
        "k": lambda: rng.randint(1, 4),
        "values": lambda: [rng.randint(-9, 20) for _ in range(number)],
        "counts": lambda: [rng.randint(1, 6) for _ in range(number + 2)],
        "readings": lambda: [round(rng.uniform(0, 10), 1) for _ in range(number)],
        "text": lambda: rng.choice(
            ("".join(rng.choices(_LETTERS, k=number)), *words("names"), *words("places"))
        ),
        "words": lambda: rng.sample(names, number),
        "letter": lambda: rng.choice(_LETTERS),
        "sentence": lambda: " ".join(rng.sample([*words("things"), *names], 3)),
        "scores": lambda: {name: rng.randint(1, 50) for name in rng.sample(names, 3)},
        "rows": lambda: [[rng.randint(0, 9) for _ in range(3)] for _ in range(rng.randint(2, 3))],
    }
    return made[argument]()
