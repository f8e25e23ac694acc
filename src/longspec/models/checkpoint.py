"""Reading weights from a folder in the Hugging Face layout, one tensor at a time."""

import contextlib
import math
import pickle
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from longspec.errors import UserError, shown
from longspec.models.placement import out_of_memory
from longspec.models.sharding import Cut
from longspec.records import ShardIndex, read_record

_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class WeightFiles:
    """The weights of a model folder: safetensors or pickled `.bin` files, whole or in shards.

    The constructor opens and checks the files; `tensor` reads one tensor.
    A context manager: leaving it closes the files; tensors that were read stay valid.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        with self._stack:  # if a later file is bad, this closes the open ones
            self._file_of = self._open()
            self._stack = self._stack.pop_all()
        self.names: set[str] = set(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, from the file's header."""
        return self._find(name).meta(name)[0]

    def num_bytes(self) -> int:
        """The bytes of all tensors together, from the files' headers."""
        return sum(self._bytes_of(name) for name in self.names)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most bytes of the weights are stored in."""
        totals: Counter[torch.dtype] = Counter()
        for name in self.names:
            totals[self._find(name).meta(name)[1]] += self._bytes_of(name)
        return totals.most_common(1)[0][0]

    def tensor(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        """Read one tensor, on the CPU and in its stored dtype; with `cut` only a part of it."""
        file = self._find(name)
        return file.tensor(name, () if cut is None else cut(file.meta(name)[0]))

    def _bytes_of(self, name: str) -> int:
        shape, dtype = self._find(name).meta(name)
        return math.prod(shape) * dtype.itemsize

    def _find(self, name: str) -> "_File":
        if name not in self._file_of:
            raise UserError(f"{self.folder} has no tensor {name!r}")
        return self._file_of[name]

    def _open(self) -> "dict[str, _File]":
        for single in _SINGLE_FILES:
            if (self.folder / single).is_file():
                file = self._open_file(self.folder / single)
                if not file.names:
                    raise UserError(f"{self.folder / single} holds no tensors")
                return dict.fromkeys(file.names, file)
            index = self.folder / f"{single}.index.json"
            if index.is_file():
                return self._open_shards(index)
        raise UserError(
            f"{self.folder} has no weights: no {' or '.join(_SINGLE_FILES)}, and no index of shards"
        )

    def _open_shards(self, index: Path) -> "dict[str, _File]":
        weight_map = _read_index(index)
        files: dict[str, _File] = {}
        for shard in sorted(set(weight_map.values())):
            if not (self.folder / shard).is_file():
                raise UserError(f"{index.name} names {self.folder / shard}, which is missing: fetch it again")
            files[shard] = self._open_file(self.folder / shard)
        for name, shard in weight_map.items():
            if name not in files[shard].names:
                raise UserError(
                    f"{index.name} says that {self.folder / shard} has the tensor {name!r}, but it does not"
                )
        return {name: files[shard] for name, shard in weight_map.items()}

    def _open_file(self, path: Path) -> "_File":
        if path.suffix == ".safetensors":
            return _SafetensorsFile(path, self._stack)
        return _PickleFile(path)


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_record(index, ShardIndex).weight_map
    if not weight_map:
        raise UserError(f"{index} names no tensors")
    for name, shard in weight_map.items():
        # Only a plain file name: an index must not point to files outside its folder.
        if shard in ("", ".", "..") or "/" in shard or "\0" in shard or len(shard) > 255:
            raise UserError(f"{index} names {shown(shard)} for {shown(name)}, which is not a file name")
    return weight_map


class _File(Protocol):
    """One open weight file."""

    names: set[str]

    def meta(self, name: str) -> tuple[tuple[int, ...], torch.dtype]: ...

    def tensor(self, name: str, part: tuple[slice, ...]) -> torch.Tensor: ...


class _SafetensorsFile:
    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        from safetensors import safe_open

        self.path = path
        try:
            self.file = stack.enter_context(safe_open(path, framework="pt"))
            self.names = set(self.file.keys())
            self.metas = {name: self._read_meta(name) for name in self.names}
        except UserError:
            raise
        except Exception as error:  # SafetensorError, OSError, and whatever a damaged header causes
            raise _damaged(path, error) from error

    def _read_meta(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        view = self.file.get_slice(name)
        kind = view.get_dtype()
        if kind not in _SAFETENSORS_TYPES:
            raise UserError(f"{self.path}: tensor {name!r} has the type {kind}, which is not supported")
        return tuple(view.get_shape()), _SAFETENSORS_TYPES[kind]

    def meta(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self.metas[name]

    def tensor(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self.file.get_slice(name)[part] if part else self.file.get_tensor(name)
        except Exception as error:
            raise _damaged(self.path, error) from error
        return tensor


class _PickleFile:
    """A `.bin` file. `weights_only` keeps it from running code; it is mapped if its format allows."""

    def __init__(self, path: Path) -> None:
        try:
            mapped = zipfile.is_zipfile(path)  # files from before torch 1.6 are not, and cannot be mapped
            with warnings.catch_warnings(action="ignore"):  # bad pickles end in an error anyway
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            raise UserError(
                f"{path} is damaged, or holds code besides tensors, which is never run"
            ) from error
        except Exception as error:
            raise _damaged(path, error) from error
        if not isinstance(state, dict) or not all(_is_entry(*item) for item in state.items()):
            raise UserError(f"{path} holds something other than named tensors")
        self.state: dict[str, torch.Tensor] = state
        self.names = set(state)

    def meta(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(self.state[name].shape), self.state[name].dtype

    def tensor(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        return self.state[name][part] if part else self.state[name]


def _is_entry(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, torch.Tensor)


def _damaged(path: Path, error: Exception) -> UserError | MemoryError:
    if out_of_memory(error):
        return MemoryError(f"there is not enough memory to read {path}")
    return UserError(f"{path} is truncated or damaged ({_first_line(error)}): fetch it again")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
