"""The one exception type that users are meant to read, and the checks that many places share."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

Entry = TypeVar("Entry")


class UserError(ValueError):
    """Something the user can mend: the message names the bad value and the way out, in one line.

    The command line prints it without a traceback and exits with code 2.
    """


@contextlib.contextmanager
def naming(source: object) -> Iterator[None]:
    """Put where a bad value stands, such as a file, in front of what is said about it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


def entry(what: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """The entry of a table by its name; `what` says in the error what the entries are."""
    if name not in table:
        raise UserError(f"the {what} {name!r} is unknown: take one of {', '.join(table)}")
    return table[name]


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on in a folder that was begun with other settings."""
    other = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if other:
        raise UserError(
            f"{folder} was begun with other settings ({'; '.join(other)}): use the same, or another folder"
        )


def whole_number(name: str, value: Any) -> int:
    """The value as an int; any library's integers will do, and nothing else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise UserError(f"{name} is {value!r}; a whole number is needed") from None


def number(name: str, value: Any) -> float:
    """The value as a float, if it is a finite number of any kind."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(f"{name} is {value!r}; a finite number is needed")
    return float(value)


def whole_numbers(name: str, values: Any) -> list[int]:
    """The same for a list or an array of them."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise UserError(f"{name} is {values!r}; a list of whole numbers is needed")
    return [whole_number(f"one of {name}", value) for value in values]
