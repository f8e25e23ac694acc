"""Options that describe themselves: a field of a dataclass with its help and its bounds.

What the library checks, what `--help` shows and what a flag reads is written once, where the option stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from longspec.errors import UserError, number, whole_number, whole_numbers


def option(default: Any, help: str, least: float | None = None, most: float | None = None) -> Any:
    """A field that users may set; of a list, the bounds hold for each number. `help` is shown by `--help`."""
    return field(default=default, metadata={"help": help, "least": least, "most": most})


@dataclass(frozen=True)
class Option:
    """A field that `option` made, for whoever reads values for it or describes it."""

    name: str
    type: Any
    """int, float or tuple[int, ...], without the None that it may also be."""
    default: Any
    help: str
    least: float | None = None
    most: float | None = None

    def check(self, value: Any) -> Any:
        """The value in the option's type; a bad one is refused by name."""
        if value is None and self.default is None:
            return None
        if self.type is int:
            self._check_bounds(value := whole_number(self.name, value), "it")
        elif self.type is float:
            self._check_bounds(value := number(self.name, value), "it")
        else:
            value = tuple(whole_numbers(self.name, value))
            if not value:
                raise UserError(f"{self.name} is empty; give at least one number")
            for one in value:
                self._check_bounds(one, "each of its numbers", list(value))
        return value

    def _check_bounds(self, value: float, subject: str, shown: Any = None) -> None:
        shown = value if shown is None else shown
        least, most = self.least, self.most
        if least is not None and most is not None and not least <= value <= most:
            raise UserError(f"{self.name} is {shown}; {subject} must lie between {least:g} and {most:g}")
        if least is not None and value < least:
            raise UserError(f"{self.name} is {shown}; {subject} must be at least {least:g}")

    def parse(self, text: str) -> Any:
        """A value that is written as text; the numbers of a list are separated by commas or by an x."""
        try:
            if self.type in (int, float):
                return self.type(text)
            return tuple(int(part) for part in text.replace("x", ",").split(","))
        except ValueError:
            wanted = {int: "a whole number", float: "a number"}.get(self.type, "numbers like 4,16,16")
            raise UserError(f"{self.name} is {text!r}; {wanted} is needed") from None

    def format(self, value: Any) -> str:
        """The value as `parse` reads it."""
        return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def options_of(cls: type) -> dict[str, Option]:
    """The options of a dataclass, by name."""
    types = get_type_hints(cls)
    return {
        one.name: Option(one.name, _bare(types[one.name]), one.default, **one.metadata)
        for one in fields(cls)
        if "help" in one.metadata
    }


def _bare(annotation: Any) -> Any:
    """The type of an option, without the None that it may be."""
    parts = get_args(annotation)
    bare = parts[0] if NoneType in parts else annotation
    if bare not in (int, float, tuple[int, ...]):
        raise TypeError(f"an option is an int, a float or a tuple[int, ...], and not {annotation}")
    return bare
