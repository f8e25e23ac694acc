"""The methods by name. Every method file registers its class here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from longspec.decoding.methods.base import Auto, Method, MethodChoice
from longspec.errors import UserError, entry
from longspec.option import Option

_METHODS: dict[str, type[Method]] = {}

MethodClass = TypeVar("MethodClass", bound=type[Method])


def register(cls: MethodClass) -> MethodClass:
    """Make a method known by name to `generate`, to the command line and to the benchmarks.

    A class decorator, above `@dataclass(frozen=True)`.
    """
    if cls.name in choices():
        raise ValueError(f"there is a method {cls.name!r} already; give this one another name")
    for name, one in cls.options().items():
        known = all_options().get(name)
        if known is not None and known[0].type != one.type:
            raise TypeError(
                f"option {name} of method {cls.name!r} is {one.type}, but {known[0].type} of {known[1]}"
            )
    _METHODS[cls.name] = cls
    return cls


def methods() -> Mapping[str, type[Method]]:
    """All methods by name, in the order in which they were registered."""
    return MappingProxyType(_METHODS)


def choices() -> Mapping[str, type[MethodChoice]]:
    """The choices of a caller: `auto` and all methods."""
    return {Auto.name: Auto, **_METHODS}


def find(name: str) -> type[MethodChoice]:
    return entry("method", name, choices())


def all_options() -> dict[str, tuple[Option, list[str]]]:
    """Every option of every choice, and the names of the choices that have it."""
    found: dict[str, tuple[Option, list[str]]] = {}
    for cls in choices().values():
        for name, one in cls.options().items():
            found.setdefault(name, (one, []))[1].append(cls.name)
    return found


def choose_method(name: str, options: Mapping[str, Any]) -> MethodChoice:
    """A method with these options. An option that the method does not have is refused."""
    cls = find(name)
    own = cls.options()
    for given in options:
        if given not in own:
            owners = all_options().get(given, (None, []))[1]
            way_out = f"it is an option of {', '.join(owners)}" if owners else "no method has it"
            raise UserError(f"method {name!r} has no option {given!r}; {way_out}")
    return cls(**options)


def read_label(label: str) -> MethodChoice:
    """The method that a label means: `lookup:6`, `tree:8x32x32@64+12`, `magicdec:4:window=256`.

    After the name come a size, in the method's own short form, and options by name.
    """
    name, *parts = label.split(":")
    cls = find(name)
    options: dict[str, Any] = {}
    for part in parts:
        key, is_named, text = part.partition("=")
        if is_named:
            own = cls.options()
            options[key] = own[key].parse(text) if key in own else text
        else:
            options |= cls.read_size(part)
    return choose_method(name, options)
