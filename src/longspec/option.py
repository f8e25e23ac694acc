"""Options that describe themselves: a field of a dataclass with its help and its bounds.

The library's checks, `--help` and the flags all read this one place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from longspec.errors import UserError, flag, number, shown, whole_number, whole_numbers

_LISTS: dict[Any, Any] = {tuple[int, ...]: int, tuple[float, ...]: float}
_WANTED: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    tuple[int, ...]: "a list of whole numbers with commas between them",
    tuple[float, ...]: "a list of numbers with commas between them",
}


def option(
    default: Any, help: str, least: float | None = None, most: float | None = None, metavar: str | None = None
) -> Any:
    """A field that users may set. The bounds of a list hold for each number. `--help` shows `help`."""
    return field(default=default, metadata={"help": help, "least": least, "most": most, "metavar": metavar})


@dataclass(frozen=True)
class Option:
    """A field that `option` made."""

    name: str
    type: Any
    """bool, int, float, str, Path, or a tuple of ints or floats; without the None that it may also be."""
    default: Any
    help: str
    least: float | None = None
    most: float | None = None
    metavar: str | None = None
    """What stands for a value in `--help`, if the type does not say enough."""

    def check(self, value: Any) -> Any:
        """The value in the option's type; a bad one is refused by name."""
        if value is None and self.default is None:
            return None
        if self.type is bool:
            return flag(self.name, value)
        if self.type in (str, Path):
            return self.type(value)
        if self.type in _LISTS:
            return self._check_list(value)
        value = whole_number(self.name, value) if self.type is int else number(self.name, value)
        self._check_bounds(value, "it")
        return value

    def _check_list(self, value: Any) -> tuple[Any, ...]:
        if _LISTS[self.type] is int:
            value = tuple(whole_numbers(self.name, value))
        else:
            value = tuple(number(f"one of {self.name}", one) for one in value)
        if not value:
            raise UserError(f"{self.name} is empty; give at least one number")
        for one in value:
            self._check_bounds(one, "each of its numbers", list(value))
        return value

    def _check_bounds(self, value: float, subject: str, shown: Any = None) -> None:
        shown = value if shown is None else shown
        least, most = self.least, self.most
        if least is not None and most is not None and not least <= value <= most:
            raise UserError(
                f"{self.name} is {shown}; {subject} must lie between {least:.15g} and {most:.15g}"
            )
        if least is not None and value < least:
            raise UserError(f"{self.name} is {shown}; {subject} must be at least {least:.15g}")

    def parse(self, text: str) -> Any:
        """A value that is written as text; the numbers of a list are separated by commas or by an x."""
        try:
            if (kind := _LISTS.get(self.type)) is not None:
                return tuple(kind(part) for part in text.replace("x", ",").split(","))
            return self.type(text)
        except ValueError:
            raise UserError(f"{self.name} is {text!r}; {_WANTED[self.type]} is needed") from None

    def format(self, value: Any) -> str:
        return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def num_bytes(name: str, size: Any) -> int:
    """A number of bytes, given as a number or as text such as 8GB."""
    if not isinstance(size, str):
        size = whole_number(name, size)
        if size < 1:
            raise UserError(f"{name} is {shown(size)}; it must be at least 1 byte")
        return int(size)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", size.strip().lower())
    if found is None or found[2] == "i" or not 0 < float(found[1]) < 1e18:
        raise UserError(f"{shown(size)} is not a size like 8GB, 512MB or 1.5GiB")
    base = 1024 if found[2].endswith("i") else 1000
    return int(float(found[1]) * base ** (" kmgt".index(found[2][:1] or " ")))


def options_of(cls: type) -> dict[str, Option]:
    types = get_type_hints(cls)
    return {
        one.name: Option(one.name, _bare(types[one.name]), one.default, **one.metadata)
        for one in fields(cls)
        if "help" in one.metadata
    }


def check_options(settings: Any) -> None:
    """Check the options of a frozen dataclass, and give their values the right types."""
    for one in options_of(type(settings)).values():
        object.__setattr__(settings, one.name, one.check(getattr(settings, one.name)))


def _bare(annotation: Any) -> Any:
    """The type of an option, without the None that it may be."""
    parts = get_args(annotation)
    bare = parts[0] if NoneType in parts else annotation
    if bare not in (bool, int, float, str, Path, *_LISTS):
        raise TypeError(f"{annotation} is not a type that an option may have")
    return bare
