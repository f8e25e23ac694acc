"""The small files beside a model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspec.config import ModelConfig
from longspec.errors import UserError, naming, shown, whole_number
from longspec.hub.resolve import TargetFiles
from longspec.models.families import config_from_hf
from longspec.records import read_record


def read_config(folder: Path, values: Mapping[str, Any] | None = None) -> ModelConfig:
    """The shape of the model in a Hugging Face folder, or of `values`, the content of its config.json."""
    if values is None:
        folder /= "config.json"
        values = read_record(folder, dict[str, Any])
    with naming(folder):
        return config_from_hf(values)


def matrix_types(files: TargetFiles, config: ModelConfig) -> Mapping[str, int]:
    """How many weights of each type a target's files have in its matrices, by the header of a GGUF or by
    config.json; empty if these do not say it."""
    if files.config is not None or config.quantisation is not None:
        return files.matrix_types
    values = read_record(files.folder / "config.json", dict[str, Any])
    dtype = values.get("dtype", values.get("torch_dtype"))
    return {dtype: config.num_parameters} if isinstance(dtype, str) else {}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The model's own settings for generation; empty if it has none."""
    path = folder / "generation_config.json"
    return read_record(path, dict[str, Any]) if path.is_file() else {}


def eos_ids(folder: Path, *more: int | None) -> frozenset[int]:
    """Every token id that ends an answer: from the model's files, and `more`, where they are known."""
    found = {one for one in more if one is not None}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = read_record(path, dict[str, Any]).get("eos_token_id") if path.is_file() else None
        for one in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            with naming(path):
                found.add(whole_number("eos_token_id", one))
                if not abs(one) < 2**31:
                    raise UserError(f"eos_token_id is {shown(one)}, which is not a token id")
    return frozenset(found)
