"""Read records one by one, and the prompts and documents in them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longspec.data.inputs import find_files
from longspec.data.read import Position, read_chunks
from longspec.errors import UserError, lone_surrogate, naming
from longspec.records import MOST_BYTES, parse_record


def read_records(inputs: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record of these files and folders, with its place, such as "texts.jsonl line 3"."""
    if not inputs:
        return
    for chunk in read_chunks(find_files(inputs), Position()):
        for number, raw in chunk.records:
            place = chunk.file.place(number)
            yield place, parse_record(raw, dict[str, Any], place) if isinstance(raw, bytes) else raw
        if chunk.fault:
            raise UserError(f"{chunk.file.label}: {chunk.fault}")


class JsonLines:
    """The objects of a JSONL file: all are checked once, then read from disk by index."""

    def __init__(self, path: Path, check: Callable[[Mapping[str, Any]], object]) -> None:
        self.path, self._offsets = path, [0]
        digest = hashlib.sha256()
        try:
            with open(path, "rb") as file:
                # Bounded, because a file can be one line without end.
                for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES + 1), b""), 1):
                    digest.update(line)
                    if line.strip():
                        place = f"{path}, line {number}"
                        record = parse_record(line, dict[str, Any], place)
                        with naming(place):
                            check(record)
                        self._offsets[-1:] = [file.tell() - len(line), file.tell()]
                    else:
                        self._offsets[-1] = file.tell()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        if not len(self):
            raise UserError(f"{path} has no lines; one JSON object per line is needed")
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        with open(self.path, "rb") as file:
            file.seek(self._offsets[index])
            return parse_record(file.readline(), dict[str, Any], self.path)


def read_prompt(record: Mapping[str, Any]) -> tuple[list[dict[str, str]], list[str]]:
    """The messages to answer, and the user's later turns."""
    messages, turns = record.get("messages"), record.get("turns")
    if isinstance(messages, list) and messages:
        if not all(
            isinstance(one, Mapping) and _texts(one.get("role"), one.get("content")) for one in messages
        ):
            raise UserError("each of 'messages' needs texts 'role' and 'content'")
        found = [{"role": one["role"], "content": one["content"]} for one in messages]
        while found and found[-1]["role"] == "assistant":
            found.pop()
        if not found or found[-1]["role"] != "user":
            raise UserError("'messages' have no user's message to answer")
        return found, []
    if isinstance(turns, list) and turns and _texts(*turns):
        return [{"role": "user", "content": turns[0]}], list(turns[1:])
    if _texts(record.get("prompt")) and record["prompt"].strip():
        return [{"role": "user", "content": record["prompt"]}], []
    raise UserError("a text 'prompt', a list of texts 'turns' or a list 'messages' is needed")


def read_document(record: Mapping[str, Any]) -> str:
    if not _texts(record.get("text")) or not record["text"].strip():
        raise UserError("a text 'text' is needed")
    return str(record["text"])


def _texts(*values: Any) -> bool:
    """Whether all are texts that UTF-8 can encode."""
    return all(isinstance(value, str) and lone_surrogate(value) is None for value in values)
