"""The one reader of JSON and YAML files. What a file holds is checked against a type before anyone uses it.

Whoever reads a file names the type it must have: a dataclass, a `TypedDict`, or `dict[str, Any]` where the
values are checked later. What does not fit is one line that names the file, the field and the value.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from longspec.errors import UserError, shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
# No file that we read is larger. Values take up to 24 times the bytes of their text, so this bounds memory.
MOST_BYTES = 32 * 2**20
# No settings have so many bytes, or values where aliases repeat them.
MOST_YAML = 256 * 2**10
# Numbers beyond this overflow float32, and no size, count or rate is so large.
MOST = 1e38


@dataclass(frozen=True)
class ShardIndex:
    """`model.safetensors.index.json`: which file holds which tensor."""

    weight_map: dict[str, str]


def read_record(path: Path, shape: type[T]) -> T:
    """The JSON in a file, in this type."""
    return parse_record(read_bytes(path, MOST_BYTES), shape, f"cannot read {path}")


def read_yaml(path: Path, shape: type[T]) -> list[T]:
    """The documents in a YAML file, in this type."""
    import yaml

    source, data = f"cannot read {path}", read_bytes(path, MOST_YAML)
    if len(data) > MOST_YAML:
        raise UserError(f"{source}: it has more than {MOST_YAML // 1024} KiB, which is too much for settings")
    try:
        documents = list(yaml.safe_load_all(data))
        if _size(documents, MOST_YAML) > MOST_YAML:
            raise UserError(f"{source}: its aliases name too much too often")
        texts = [json.dumps(one) for one in documents]
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # dates, and what holds itself
        if isinstance(error, UserError):
            raise
        raise UserError(f"{source}: {shown(' '.join(str(error).split()), quoted=False)}") from error
    return [parse_record(text.encode(), shape, source) for text in texts]


def read_bytes(path: Path, most: int) -> bytes:
    """A file, and no more of it than shows that it is too large. A pipe that nobody writes to is empty."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise UserError(f"cannot read {path}: {reason}") from error


def _size(value: Any, most: int) -> int:
    """How many values there are in a value, as far as they are not more than `most`."""
    size, inside = 1, value.values() if isinstance(value, dict) else value
    for inner in inside if isinstance(value, dict | list) else ():
        size += _size(inner, most - size)
        if size > most:
            break
    return size


def parse_record(data: bytes, shape: type[T], source: object) -> T:
    """The same for a text that was read already; `source` says in errors where it stands."""
    # Loading a target must not wait for this import before it is needed.
    from pydantic import ValidationError
    from pydantic_core import from_json

    if len(data) > MOST_BYTES:
        raise UserError(f"{source}: it has more than {MOST_BYTES // 2**20} MiB, which is too much for JSON")
    try:
        wrong = next(_absurd_numbers(from_json(data, allow_inf_nan=False), ()), None)
        if wrong is not None:
            raise UserError(f"{source}: {_field(wrong[0])} is {shown(wrong[1])}, which is no sensible number")
        validated: T = _adapter(shape).validate_json(data, strict=True)  # type: ignore[arg-type]
        return validated
    except ValidationError as error:
        raise UserError(f"{source}: {_explain(error)}") from error
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{source}: it is not JSON: {error}") from error


def as_record(value: Any, shape: type[T], source: object) -> T:
    """A part of a record that is read in its own type, when it is known which."""
    return parse_record(json.dumps(value).encode(), shape, source)


@functools.cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(shape)


def _absurd_numbers(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Numbers that are not finite or that overflow, each with the fields that lead to it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _absurd_numbers(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _absurd_numbers(inner, (*path, index))
    elif isinstance(value, int | float) and not (-MOST < value < MOST and math.isfinite(value)):
        yield path, value


def _explain(error: ValidationError) -> str:
    """The first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    field, kind = _field(first["loc"]), first["type"]
    if kind == "missing":
        return f"{field} is missing"
    if kind in ("value_error", "assertion_error"):  # raised by the type itself, which names its field
        return str(first["ctx"]["error"])
    needed = first["msg"].replace("Input should be", "it must be")
    return f"{field} is {shown(first['input'])}; {needed}"


def _field(path: tuple[str | int, ...]) -> str:
    """As in draft.cross_layers[2]."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return shown(text.lstrip("."), quoted=False) or "the whole"
