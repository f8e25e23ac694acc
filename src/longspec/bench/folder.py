"""The folder of a run: its settings, and a line per finished row that no kill and no full disk loses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, NotRequired, cast

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from longspec.atomic import check_folder, clear_unfinished, is_empty, write_whole
from longspec.errors import UserError, check_same
from longspec.records import parse_record, read_record

RUN, ROWS = "run.json", "rows.jsonl"
Row = dict[str, Any]
"""A `RowRecord`, with whatever else is worth keeping."""


_MORE = ConfigDict(extra="allow")
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


@with_config(_MORE)
class Difference(TypedDict):
    """Where an answer differs from vanilla's."""

    margin: float | None


@with_config(_MORE)
class RowRecord(TypedDict):
    """The values of a row that tables and reports are made from."""

    workload: str
    kind: str
    item: str
    method: str
    ran: str
    temperature: Seconds
    repeat: Count
    prompt_tokens: Count
    tokens: Count
    decoded_tokens: Count
    prefill_seconds: Seconds
    decode_seconds: Seconds
    load_average: float
    peak_memory: Count
    memory_above_start: Count
    compared: bool
    difference: Difference | None
    rounds: NotRequired[Count]
    accepted_by_depth: NotRequired[list[Count]]
    token_ids: NotRequired[list[list[Count]]]
    depths: NotRequired[list[list[Count] | None]]
    pieces: NotRequired[list[list[str]]]
    batch: NotRequired[str]
    batch_seconds: NotRequired[Seconds]


@with_config(_MORE)
class RunFacts(TypedDict):
    """What must be the same for a run to be resumed."""

    environment: dict[str, Any]
    max_new_tokens: Count
    repeats: Count
    batch: NotRequired[Count]


@with_config(_MORE)
class RunRecord(TypedDict):
    """What `run.json` says."""

    facts: RunFacts
    begun: str
    command: str
    left_out: NotRequired[dict[str, str]]


def row_key(row: Row) -> tuple[str, str, str, float, int]:
    return row["workload"], row["item"], row["method"], row["temperature"], row["repeat"]


def check_place(path: Path) -> None:
    """Refuse a folder that is not empty, unless it holds a run of `longspec bench`."""
    check_folder(path)
    if not (path / RUN).exists() and not is_empty(path):
        raise UserError(f"{path} is not empty and has no {RUN} of longspec bench: name another folder")


class RunFolder:
    """A run that can be resumed: opened again with the same `facts`, it has the finished rows."""

    def __init__(self, path: Path, facts: dict[str, Any], about: dict[str, Any]) -> None:
        """`facts` must be equal for a run to be resumed; `about` is written once, when the run begins."""
        self.path = path
        check_place(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            clear_unfinished(path)
            if (path / RUN).exists():
                check_same(path, read_record(path / RUN, RunRecord)["facts"], facts)
            else:
                write_whole(path / RUN, json.dumps({"facts": facts, **about}, indent=1).encode() + b"\n")
            self.rows, self._size = _read_rows(path / ROWS)
            self._file = open(path / ROWS, "ab")  # noqa: SIM115 # closed by __exit__
            # Drop a line that a killed run left unfinished.
            self._file.truncate(self._size)
        except OSError as error:
            raise UserError(f"cannot write to {path}: {error.strerror or error}") from error

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: Row) -> None:
        """Write a finished row. If that fails, the rows before it stay whole."""
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        try:
            written = os.write(self._file.fileno(), line)
            while written < len(line):
                written += os.write(self._file.fileno(), line[written:])
            os.fsync(self._file.fileno())
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._size)
            raise UserError(
                f"cannot write to {self.path / ROWS}: {error.strerror}; the {len(self.rows)} finished rows "
                "are kept: make room and give the same command again to continue"
            ) from error
        self._size += len(line)
        self.rows.append(row)


def _read_rows(path: Path) -> tuple[list[Row], int]:
    """The finished rows, and where the last of them ends."""
    if not path.exists():
        return [], 0
    rows, size = [], 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break  # the run was killed while it wrote this one
            rows.append(cast("Row", parse_record(line, RowRecord, f"{path}, line {number}")))
            size += len(line)
    return rows, size


def read_run(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """A run, finished or not, and its rows."""
    if not (path / RUN).is_file():
        raise UserError(f"{path} is not the folder of a run: it has no {RUN}")
    rows, _ = _read_rows(path / ROWS)
    if not rows:
        raise UserError(f"{path} has no finished rows yet")
    return dict(read_record(path / RUN, RunRecord)), rows
