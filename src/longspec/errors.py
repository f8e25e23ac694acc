"""The exception that users see, and checks that many modules share."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

Entry = TypeVar("Entry")

# How an error says to install what training needs.
INSTALL_TRAINING = "pip install '.[train]'"
# An error shows this many characters of a bad value.
_LONGEST = 120


class UserError(ValueError):
    """Something that the user can fix: one line that names the bad value and the fix.

    The command line prints it without a traceback and exits with code 2.
    """


class BrokenTarget(UserError):
    """The target cannot compute as it was loaded; no request can change that."""


@contextlib.contextmanager
def naming(source: object) -> Iterator[None]:
    """Put the source of a bad value, such as a file, in front of the message."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


def shown(value: Any, quoted: bool = True) -> str:
    """A value for an error message: on one line, without control characters, and not too long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of over 4,300 digits
        return "a number of thousands of digits"
    if isinstance(value, str) and not quoted:
        text = text[1:-1]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def lone_surrogate(text: str) -> str | None:
    """The first character that UTF-8 cannot encode; JSON may contain such."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def reason_of(error: BaseException) -> str:
    """What an error of a library says, as `shown`; the name of its type where it says nothing."""
    return shown(" ".join(str(error).split()), quoted=False) or type(error).__name__


def flag(name: str, value: Any) -> bool:
    """The value, if it is True or False. Not `bool(value)`, because `bool("no")` is True."""
    if not isinstance(value, bool):
        raise UserError(f"{name} is {shown(value)}; True or False is needed")
    return value


def entry(what: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """The entry of a table by its name; an error names it as `what`."""
    check_known(what, name, table)
    return table[name]


def check_known(what: str, name: Any, names: Collection[str]) -> None:
    """Refuse a name that is not one of `names`."""
    if not isinstance(name, str) or name not in names:
        raise UserError(f"{what} {shown(name)} is unknown; there are: {', '.join(names)}")


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to continue in a folder that was begun with other settings."""
    other = [
        f"{name} was {shown(before.get(name))} and is {shown(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if other:
        raise UserError(
            f"{folder} was begun with other settings ({'; '.join(other)}): use the same, or another folder"
        )


def whole_number(name: str, value: Any) -> int:
    """The value as an int, if it is an integer of any library."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise UserError(f"{name} is {shown(value)}; a whole number is needed") from None


def number(name: str, value: Any) -> float:
    """The value as a float, if it is a finite number of any kind."""
    try:
        if not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer of hundreds of digits
        pass
    raise UserError(f"{name} is {shown(value)}; a finite number is needed")


def whole_numbers(name: str, values: Any) -> list[int]:
    """The same for a list or an array."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise UserError(f"{name} is {shown(values)}; a list of whole numbers is needed")
    return [whole_number(f"one of {name}", value) for value in values]
