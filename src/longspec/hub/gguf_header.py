"""A strict reader of GGUF headers.

Every number is checked against the size of the file before it is used. So a truncated or damaged file gives
one clear `UserError`, and never a huge allocation or a read past the end.
"""

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.errors import UserError

_STRING, _ARRAY = 8, 9
# GGUF value type -> struct format; strings and arrays are the two that are not of fixed size.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_COUNT = 1 << 20  # keys or tensors; the largest models have some thousands
_MAX_LENGTH = 1 << 24  # of a string or an array; vocabularies have some hundred thousand entries
_MAX_ELEMENTS = 1 << 48


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor is in the file."""

    name: str
    shape: tuple[int, ...]  # outermost first, as torch counts
    type_name: str
    offset: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata and tensor table of a file; all offsets are checked."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GGUFHeader:
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24 or file.read(4) != b"GGUF":
                raise UserError(f"{path} is not a GGUF file: it does not begin with GGUF and a header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Walker(path, data).read()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def damaged(path: Path, what: str) -> UserError:
    """The error for a GGUF that contradicts itself."""
    return UserError(f"{path} is truncated or damaged: {shortened(what)}; fetch the file again")


def shortened(text: str) -> str:
    """Untrusted text from a file, shortened to one printable line."""
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable if len(printable) <= 200 else printable[:200] + "..."


class _Walker:
    """Reads values one after another from a mapped file, never past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 4  # after the magic

    def read(self) -> GGUFHeader:
        version = self.scalar("I")
        if version not in (2, 3):
            hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise UserError(f"{self.path} has GGUF version {version}{hint}; versions 2 and 3 are supported")
        num_tensors, num_keys = self.count("tensors", _MAX_COUNT), self.count("keys", _MAX_COUNT)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string("a key")
            if key in metadata:
                raise damaged(self.path, f"the key {key!r} occurs twice")
            metadata[key] = self.value(self.scalar("I"), key)
        entries = [self.tensor_entry() for _ in range(num_tensors)]
        return GGUFHeader(self.path, metadata, self.place(entries, metadata.get("general.alignment", 32)))

    def take(self, num_bytes: int, what: str) -> int:
        """Skip `num_bytes`; returns where they begin."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise damaged(self.path, f"{what} at byte {start} goes past the end of the file")
        self.position += num_bytes
        return start

    def scalar(self, code: str) -> Any:
        start = self.take(struct.calcsize("<" + code), "a number")
        return struct.unpack_from("<" + code, self.data, start)[0]

    def count(self, what: str, limit: int) -> int:
        number: int = self.scalar("Q")
        if number > limit:
            raise damaged(self.path, f"it claims {number} {what}")
        return number

    def string(self, what: str) -> str:
        length = self.count(f"bytes for {what}", _MAX_LENGTH)
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise damaged(self.path, f"{what} at byte {start} is not UTF-8") from error

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise damaged(self.path, f"the value of {key!r} has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self, key: str) -> list[Any]:
        what = f"the array {key!r}"
        kind, length = self.scalar("I"), self.count(f"elements for {what}", _MAX_LENGTH)
        if kind == _STRING:
            return [self.string(what) for _ in range(length)]
        if kind not in _SCALARS:
            raise damaged(self.path, f"{what} has the unknown element type {kind}")
        code = _SCALARS[kind]
        start = self.take(struct.calcsize("<" + code) * length, what)
        return list(struct.unpack_from(f"<{length}{code}", self.data, start))

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("a tensor name")
        num_dims = self.scalar("I")
        if not 1 <= num_dims <= 4:
            raise damaged(self.path, f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(reversed([self.scalar("Q") for _ in range(num_dims)]))
        if not 0 < math.prod(shape) <= _MAX_ELEMENTS:
            raise damaged(self.path, f"tensor {name!r} has the impossible shape {list(shape)}")
        return name, shape, self.scalar("I"), self.scalar("Q")

    def place(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: Any
    ) -> dict[str, TensorInfo]:
        """Turn table entries into tensors with checked offsets."""
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise damaged(self.path, f"the alignment {alignment!r} is not a power of two")
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in entries:
            if name in tensors:
                raise damaged(self.path, f"tensor {name!r} occurs twice")
            type_name, block, block_bytes = _tensor_type(type_id)
            num_bytes = math.prod(shape) // block * block_bytes
            start = data_start + offset
            if shape[-1] % block or offset % alignment:
                raise damaged(self.path, f"tensor {name!r} is not aligned to blocks")
            if start + num_bytes > len(self.data):
                raise damaged(self.path, f"tensor {name!r} goes past the end of the file")
            tensors[name] = TensorInfo(name, shape, type_name, start, num_bytes)
        self.refuse_overlap(tensors)
        return tensors

    def refuse_overlap(self, tensors: dict[str, TensorInfo]) -> None:
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.num_bytes > after.offset:
                raise damaged(self.path, f"tensors {before.name!r} and {after.name!r} overlap")


def _tensor_type(type_id: int) -> tuple[str, int, int]:
    """Name, elements per block and bytes per block of a ggml type; an unknown id gets size 0."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        return str(type_id), 1, 0
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return kind.name, block, block_bytes
