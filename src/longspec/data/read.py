"""Read records from input files in chunks of bounded size, from any position."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from longspec.data.inputs import InputFile
from longspec.errors import INSTALL_TRAINING, UserError, reason_of

_BLOCK = 1 << 20
_CHUNK_BYTES = 1 << 20
_CHUNK_RECORDS = 512
_LONGEST_LINE = 1 << 28
_ROWS = 64
_BROKEN = (OSError, EOFError, lzma.LZMAError, zlib.error)
_BOM = b"\xef\xbb\xbf"

Raw = bytes | dict[str, Any]
"""A record as a line of JSON, or as an object."""


@dataclass(frozen=True)
class Position:
    """A place in the inputs; everything before it is done."""

    file: int = 0
    number: int = 1
    """The next record of that file; lines and rows count from 1."""
    offset: int = 0
    """How many tokens of its document are done."""
    records: int = 0
    """The number of records before it, in all files."""


@dataclass(frozen=True)
class Chunk:
    """Some consecutive records of one file."""

    index: int
    file: InputFile
    records: list[tuple[int, Raw]]
    """(number, content)."""
    first_record: int
    """The number of records before it, in all files."""
    num_bytes: int
    """How many bytes of the file were read for it."""
    fault: str | None = None
    """What is wrong with the file after these records, if anything."""
    fault_number: int = 0


def read_chunks(
    files: Sequence[InputFile], start: Position, skip: int = 0, limit: int | None = None
) -> Iterator[Chunk]:
    """The records from `start` on, without the first `skip` of the inputs; at most `limit` after those."""
    done = start.records
    last = None if limit is None else skip + limit
    for index in range(start.file, len(files)):
        number = start.number if index == start.file else 1
        for chunk in _file_chunks(index, files[index], number, done):
            before, done = done, done + len(chunk.records)
            kept = chunk.records[max(0, skip - before) : None if last is None else max(0, last - before)]
            chunk = replace(chunk, records=kept, first_record=max(before, skip))
            if last is not None and done >= last:
                yield replace(chunk, fault=None)  # the fault comes after the last wanted record
                return
            yield chunk


def _file_chunks(index: int, file: InputFile, start: int, before: int) -> Iterator[Chunk]:
    records: list[tuple[int, Raw]] = []
    size, number, reported = 0, 0, 0
    fault = None
    try:
        for number, raw, position in _records(file):
            if number < start:
                continue
            records.append((number, raw))
            size += len(raw) if isinstance(raw, bytes) else _size(raw)
            if size >= _CHUNK_BYTES or len(records) >= _CHUNK_RECORDS:
                yield Chunk(index, file, records, before, position - reported)
                before, reported = before + len(records), position
                records, size = [], 0
        if number == 0:
            fault = "it is empty"
    except _BROKEN as error:
        fault = f"the rest cannot be read: {reason_of(error)}"
    left = file.num_bytes - reported
    yield Chunk(index, file, records, before, left, fault, number + 1 if number else 0)


def _records(file: InputFile) -> Iterator[tuple[int, Raw, int]]:
    """(number, content, bytes of the file that were read for it) of every record. Blank lines have a number
    but are not records."""
    with open(file.path, "rb") as content:
        if file.kind == "lines":
            for number, line in enumerate(_lines(_blocks(file.path, content)), start=1):
                record = line.removeprefix(_BOM) if number == 1 else line
                if record.strip():
                    yield number, record, content.tell()
            return
        arrow = _need("pyarrow", file.path)
        with _arrow_errors(arrow):
            number = 0
            for share, batch in _parquet(content) if file.kind == "parquet" else _arrow(content):
                for first in range(0, batch.num_rows, _ROWS):
                    for row in batch.slice(first, _ROWS).to_pylist():
                        number += 1
                        yield number, row, int(share * file.num_bytes)


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        first, *others = block.split(b"\n")
        rest += first
        if len(rest) > _LONGEST_LINE:
            raise OSError(f"a line is longer than {_LONGEST_LINE >> 20} MB")
        for other in others:
            yield rest
            rest = other
    if rest:
        yield rest


def _blocks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """A file's content, decompressed, in blocks."""
    kind = path.suffix.lower()
    if kind == ".zst":
        yield from _zst_blocks(path, file)
        return
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    content: Any = openers[kind](file) if kind in openers else file
    while block := content.read1(_BLOCK):  # read1 gives what comes before a fault in the file
        yield block


def _zst_blocks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Read frame by frame, because the library's reader does not notice a file that ends too early."""
    zstandard = _need("zstandard", path)
    frame, rest = None, b""
    while rest or (rest := file.read(_BLOCK // 8)):
        frame = frame or zstandard.ZstdDecompressor().decompressobj()
        try:
            yield frame.decompress(rest)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        rest = frame.unused_data if frame.eof else b""
        frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the compressed file ends too early")


def _parquet(file: BinaryIO) -> Iterator[tuple[float, Any]]:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file)
    total, done = max(table.metadata.num_rows, 1), 0
    for batch in table.iter_batches(batch_size=_ROWS):
        done += batch.num_rows
        yield done / total, batch


def _arrow(file: BinaryIO) -> Iterator[tuple[float, Any]]:
    import pyarrow

    size = max(os.fstat(file.fileno()).st_size, 1)
    for batch in pyarrow.ipc.open_stream(file):
        yield file.tell() / size, batch


@contextlib.contextmanager
def _arrow_errors(arrow: ModuleType) -> Iterator[None]:
    try:
        yield
    except arrow.ArrowException as error:
        raise OSError(str(error)) from error


def _need(module: str, path: Path) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(f"reading {path} needs {module}: {INSTALL_TRAINING}") from error


def _size(row: dict[str, Any]) -> int:
    """The approximate bytes of a row: only texts are long."""
    return sum(len(value) if isinstance(value, str) else 64 for value in row.values())
