"""Llama and models with the same architecture: Vicuna, LongChat, SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspec.models.families.base import Family, read_flag


class Llama(Family):
    """The plain block; some models have biases in attention."""

    name = "llama"

    def flags(self, raw: Mapping[str, Any]) -> dict[str, bool]:
        bias = read_flag(raw, "attention_bias", False)
        return {"qkv_bias": bias, "output_bias": bias}
