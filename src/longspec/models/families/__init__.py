"""The model families. Each is one file, and one entry of `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspec.config import ModelConfig
from longspec.errors import UserError, shown
from longspec.models.families.base import Family
from longspec.models.families.llama import Llama
from longspec.models.families.mistral import Mistral
from longspec.models.families.qwen2 import Qwen2
from longspec.models.families.qwen3 import Qwen3

FAMILIES: dict[str, Family] = {one.name: one for one in (Llama(), Qwen2(), Qwen3(), Mistral())}


def config_from_hf(config: Any) -> ModelConfig:
    """The shape of a model, from a `transformers` config object or the dict of a `config.json`."""
    raw: dict[str, Any] = dict(config if isinstance(config, Mapping) else config.to_dict())
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(
            f"model_type {shown(family)} is not supported; the supported ones are {', '.join(FAMILIES)}"
        )
    return FAMILIES[family].read(raw)
