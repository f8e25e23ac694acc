"""Qwen2, Qwen2.5 and QwQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspec.models.families.base import Family


class Qwen2(Family):
    """q, k and v always have a bias; the output projection never has one."""

    name = "qwen2"

    def flags(self, raw: Mapping[str, Any]) -> dict[str, bool]:
        return {"qkv_bias": True}
