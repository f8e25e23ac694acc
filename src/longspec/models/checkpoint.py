"""Reading weights from a folder in the Hugging Face layout, one tensor at a time."""

import contextlib
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Self

import torch

from longspec.errors import UserError, reason_of, shown
from longspec.models.placement import out_of_memory
from longspec.models.sharding import Cut
from longspec.records import ShardIndex, read_record

_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tensor(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        """Read one tensor, on the CPU and in its stored dtype; with `cut` only a part of it."""
        if name not in self._file_of:
            raise UserError(f"{self.folder} has no tensor {name!r}")
        file = self._file_of[name]
        return file.tensor(name, () if cut is None else cut(file.shape(name)))

    def _open(self) -> "dict[str, TensorFile]":
        for single in _SINGLE_FILES:
            if (self.folder / single).is_file():
                file = open_file(self.folder / single, self._stack)
                if not file.names:
                    raise UserError(f"{self.folder / single} holds no tensors")
                return dict.fromkeys(file.names, file)
            index = self.folder / f"{single}.index.json"
            if index.is_file():
                return self._open_shards(index)
        raise UserError(
            f"{self.folder} has no weights: no {' or '.join(_SINGLE_FILES)}, and no index of shards"
        )

    def _open_shards(self, index: Path) -> "dict[str, TensorFile]":
        weight_map = _read_index(index)
        files: dict[str, TensorFile] = {}
        for shard in sorted(set(weight_map.values())):
            if not (self.folder / shard).is_file():
                raise UserError(f"{index.name} names {self.folder / shard}, which is missing: fetch it again")
            files[shard] = open_file(self.folder / shard, self._stack)
        for name, shard in weight_map.items():
            if name not in files[shard].names:
                raise UserError(
                    f"{index.name} says that {self.folder / shard} has the tensor {name!r}, but it does not"
                )
        return {name: files[shard] for name, shard in weight_map.items()}


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_record(index, ShardIndex).weight_map
    if not weight_map:
        raise UserError(f"{index} names no tensors")
    for name, shard in weight_map.items():
        # Only a plain file name: an index must not point to files outside its folder.
        if shard in ("", ".", "..") or "/" in shard or "\0" in shard or len(shard) > 255:
            raise UserError(f"{index} names {shown(shard)} for {shown(name)}, which is not a file name")
    return weight_map


class TensorFile(Protocol):
    """One open weight file."""

    names: set[str]

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor: ...


def open_file(path: Path, stack: contextlib.ExitStack) -> TensorFile:
    """Open a file of tensors until `stack` is closed; tensors that were read stay valid."""
    return _SafetensorsFile(path, stack) if path.suffix == ".safetensors" else _PickleFile(path)


class _SafetensorsFile:
    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        from safetensors import safe_open

        self.path = path
        with _explained(path):
            self.file = stack.enter_context(safe_open(path, framework="pt"))
            self.names = set(self.file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.file.get_slice(name).get_shape())

    def tensor(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        with _explained(self.path):
            tensor: torch.Tensor = self.file.get_slice(name)[part] if part else self.file.get_tensor(name)
            return tensor


class _PickleFile:
    """A `.bin` file. `weights_only` keeps it from running code; it is mapped if its format allows."""

    def __init__(self, path: Path) -> None:
        with _explained(path), warnings.catch_warnings(action="ignore"):  # bad pickles end in an error anyway
            mapped = zipfile.is_zipfile(path)  # files from before torch 1.6 are not, and cannot be mapped
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        is_named = isinstance(state, dict) and all(isinstance(name, str) for name in state)
        if not is_named or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise UserError(f"{path} holds something other than named tensors")
        self.state: dict[str, torch.Tensor] = state
        self.names = set(state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.state[name].shape)

    def tensor(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        return self.state[name][part] if part else self.state[name]


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Name the file, whatever its content makes a library raise."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} is damaged, or holds code besides tensors, which is never run") from error
    except Exception as error:
        if out_of_memory(error):
            raise MemoryError(f"there is not enough memory to read {path}") from error
        raise UserError(f"{path} is truncated or damaged ({reason_of(error)}): fetch it again") from error
