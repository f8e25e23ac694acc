"""The small JSON files beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longspec.config import ModelConfig
from longspec.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"cannot read {path}: it does not hold a JSON object")
    return values


def read_config(folder: Path) -> ModelConfig:
    """The shape of the model in a Hugging Face folder."""
    return ModelConfig.from_hf(read_json(folder / "config.json"))


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The model's own settings for generation, nothing where it has none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def eos_ids(folder: Path) -> frozenset[int]:
    """Every id that the model's files say ends an answer."""
    found: set[int] = set()
    for values in (read_generation_config(folder), read_json(folder / "config.json")):
        ids = values.get("eos_token_id")
        found |= set(ids) if isinstance(ids, list) else set() if ids is None else {ids}
    return frozenset(found)
