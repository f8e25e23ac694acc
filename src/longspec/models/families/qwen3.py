"""The dense Qwen3 models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspec.models.families.base import Family, read_flag


class Qwen3(Family):
    """Queries and keys are normed per head before rope."""

    name = "qwen3"

    def flags(self, raw: Mapping[str, Any]) -> dict[str, bool]:
        bias = read_flag(raw, "attention_bias", False)
        return {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}

    def default_head_dim(self, hidden_size: int, num_heads: int) -> int:
        return 128
