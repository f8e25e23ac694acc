"""The records of small inputs, for callers that need neither workers nor resuming."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from longspec.data.inputs import find_files
from longspec.data.read import Position, read_chunks
from longspec.errors import UserError


def read_records(inputs: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record of these files and folders with its place, such as "texts.jsonl line 3"."""
    if not inputs:
        return
    for chunk in read_chunks(find_files(inputs), Position()):
        for number, raw in chunk.records:
            place = chunk.file.place(number)
            try:
                record = json.loads(raw) if isinstance(raw, bytes) else raw
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place}: this is no JSON: {error}") from error
            if not isinstance(record, dict):
                raise UserError(f"{place}: this is {type(record).__name__} and not a JSON object")
            yield place, record
        if chunk.fault:
            raise UserError(f"{chunk.file.label}: {chunk.fault}")
