"""Aligners: functions that give a record the fields that a template expects.

An aligner takes a record and its place in the input, and returns a record. `--align NAME` chooses one;
several run in the given order, after `--rename`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Record = dict[str, Any]
Aligner = Callable[[Record, str], Record]


class BadRecord(ValueError):
    """Why a record cannot be used."""


def rename(pairs: Sequence[tuple[str, str]]) -> Aligner:
    """An aligner that renames fields; a dot reaches into objects, as in `meta.lang`."""

    def renamed(record: Record, place: str) -> Record:
        old = [name for name, _ in pairs]
        found = {new: value for name, new in pairs if (value := look_up(record, name)) is not None}
        return {name: value for name, value in record.items() if name not in old} | found

    return renamed


def look_up(record: Record, name: str) -> Any:
    """The value of a field, or None; a dot in the name reaches into an object."""
    value: Any = record
    if name in record:
        return record[name]
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def text_field(record: Record, name: str) -> str:
    return _field(record, name, str, "a text")


def list_field(record: Record, name: str) -> list[Any]:
    return _field(record, name, list, "a list")


def _field(record: Record, name: str, kind: type, wanted: str) -> Any:
    if name not in record:
        there = ", ".join(record) or "none"
        raise BadRecord(f"it has no field {name!r}, only {there}; use another with --rename FIELD={name}")
    value = record[name]
    if not isinstance(value, kind):
        found = "null" if value is None else f"of type {type(value).__name__}"
        raise BadRecord(f"its field {name!r} is {found}; {wanted} is needed")
    return value


def add_id(record: Record, place: str) -> Record:
    """If there is no `id`, add one: the file and the record's number in it."""
    return record if record.get("id") is not None else {**record, "id": place}


def from_alpaca(record: Record, place: str) -> Record:
    """`instruction`, `input` (may be empty or missing) and `output` become `prompt` and `answer`."""
    names = ["instruction", "input"] if record.get("input") else ["instruction"]
    prompt = "\n\n".join(text_field(record, name) for name in names)
    return {**record, "prompt": prompt, "answer": text_field(record, "output")}


def from_sharegpt(record: Record, place: str) -> Record:
    """`conversations` of `from` and `value` become `messages` of `role` and `content`."""
    roles = {"human": "user", "gpt": "assistant"} | {one: one for one in ("user", "assistant", "system")}
    messages = []
    for turn in list_field(record, "conversations"):
        if not isinstance(turn, dict) or turn.get("from") not in roles:
            raise BadRecord(
                f"a turn of its conversations is not from one of {', '.join(roles)}: {turn!r:.80}"
            )
        messages.append({"role": roles[turn["from"]], "content": text_field(turn, "value")})
    return {**record, "messages": messages}


def split_thought(record: Record, place: str) -> Record:
    """If `answer` begins with a thought between `<think>` and `</think>`, move it to `reasoning`."""
    thought, mark, answer = text_field(record, "answer").partition("</think>")
    if not mark:
        raise BadRecord("its field 'answer' has no '</think>'")
    return {**record, "reasoning": thought + mark, "answer": answer}


ALIGNERS: dict[str, Aligner] = {
    "id": add_id,
    "alpaca": from_alpaca,
    "sharegpt": from_sharegpt,
    "think": split_thought,
}
