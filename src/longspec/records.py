"""The only reader of JSON and YAML files. It checks the content against a type before anything uses it.

The caller gives the type: a dataclass, a `TypedDict`, or `dict[str, Any]` if the values are checked later. If
the content does not fit, the error is one line that names the file, the field and the value.
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

from longspec.errors import UserError, reason_of, shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
# No file that we read is larger. Values take up to 24 times the bytes of their text, so this limits memory.
MOST_BYTES = 32 * 2**20
# No settings file has this many bytes, or this many values when aliases repeat them.
MOST_YAML = 256 * 2**10
# Larger numbers overflow float32, and no size, count or rate is that large.
MOST = 1e38


@dataclass(frozen=True)
class ShardIndex:
    """`model.safetensors.index.json`: which file holds which tensor."""

    weight_map: dict[str, str]


def read_record(path: Path, shape: type[T]) -> T:
    """The JSON in a file, as this type."""
    return parse_record(read_bytes(path, MOST_BYTES), shape, f"cannot read {path}")


def read_yaml(path: Path, shape: type[T]) -> list[T]:
    """The documents in a YAML file, as this type."""
    import yaml

    source, data = f"cannot read {path}", read_bytes(path, MOST_YAML)
    if len(data) > MOST_YAML:
        raise UserError(
            f"{source}: it has more than {MOST_YAML // 1024} KiB, which is too large for settings"
        )
    try:
        documents = list(yaml.safe_load_all(data))
        if _size(documents, MOST_YAML) > MOST_YAML:
            raise UserError(f"{source}: its aliases name too much too often")
        texts = [json.dumps(one) for one in documents]
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # dates, and what holds itself
        if isinstance(error, UserError):
            raise
        raise UserError(f"{source}: {reason_of(error)}") from error
    return [parse_record(text.encode(), shape, source) for text in texts]


def read_bytes(path: Path, most: int) -> bytes:
    """A file, up to one byte more than `most`. A pipe without a writer is empty."""
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
    """The same for text that was already read; errors name `source`."""
    # Imported late, so that a target can start to load before.
    from pydantic import ValidationError
    from pydantic_core import from_json

    if len(data) > MOST_BYTES:
        raise UserError(f"{source}: it has more than {MOST_BYTES // 2**20} MiB, which is too large for JSON")
    try:
        wrong = next(_absurd_numbers(from_json(data, allow_inf_nan=False), ()), None)
        if wrong is not None:
            raise UserError(f"{source}: {_field(wrong[0])} is {shown(wrong[1])}, which is not a valid number")
        validated: T = _adapter(shape).validate_json(data, strict=True)  # type: ignore[arg-type]
        return validated
    except ValidationError as error:
        raise UserError(f"{source}: {_explain(error)}") from error
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{source}: it is not JSON: {error}") from error


def as_record(value: Any, shape: type[T], source: object) -> T:
    """Check a part of a record against its own type."""
    return parse_record(json.dumps(value).encode(), shape, source)


@functools.cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(shape)


def _absurd_numbers(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Numbers that are not finite or too large, each with its path of fields."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _absurd_numbers(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _absurd_numbers(inner, (*path, index))
    elif isinstance(value, int | float) and not (-MOST < value < MOST and math.isfinite(value)):
        yield path, value


def _explain(error: ValidationError) -> str:
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
