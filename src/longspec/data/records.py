"""The records of small inputs, for callers that need neither workers nor resuming."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from longspec.data.inputs import find_files
from longspec.data.read import Position, read_chunks
from longspec.errors import UserError
from longspec.records import parse_record


def read_records(inputs: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record of these files and folders with its place, such as "texts.jsonl line 3"."""
    if not inputs:
        return
    for chunk in read_chunks(find_files(inputs), Position()):
        for number, raw in chunk.records:
            place = chunk.file.place(number)
            yield place, parse_record(raw, dict[str, Any], place) if isinstance(raw, bytes) else raw
        if chunk.fault:
            raise UserError(f"{chunk.file.label}: {chunk.fault}")
