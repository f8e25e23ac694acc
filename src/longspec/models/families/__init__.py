"""The model families, a class each. `Family` says what a class may override."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspec.config import ModelConfig
from longspec.errors import UserError, shown
from longspec.models.families.base import Family, read_flag


class Llama(Family):
    """Llama and models with the same block: Vicuna, LongChat, SmolLM2; some have biases in attention."""

    name = "llama"

    def flags(self, raw: Mapping[str, Any]) -> dict[str, bool]:
        bias = read_flag(raw, "attention_bias", False)
        return {"qkv_bias": bias, "output_bias": bias}


class Qwen2(Family):
    """Qwen2, Qwen2.5 and QwQ: q, k and v always have a bias, and the output projection never has one."""

    name = "qwen2"

    def flags(self, raw: Mapping[str, Any]) -> dict[str, bool]:
        return {"qkv_bias": True}


class Qwen3(Llama):
    """The dense Qwen3 models: queries and keys are normed per head before rope."""

    name = "qwen3"

    def flags(self, raw: Mapping[str, Any]) -> dict[str, bool]:
        return {**super().flags(raw), "qk_norm": True}

    def default_head_dim(self, hidden_size: int, num_heads: int) -> int:
        return 128


class Mistral(Family):
    """Mistral without a sliding window: 7B from v0.2 on, Nemo, Small. It has no biases."""

    name = "mistral"

    def flags(self, raw: Mapping[str, Any]) -> dict[str, bool]:
        return {}

    def window(self, raw: Mapping[str, Any]) -> int | None:
        # 4096 is the default of transformers for configs without the field.
        return raw.get("sliding_window", 4096)


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
