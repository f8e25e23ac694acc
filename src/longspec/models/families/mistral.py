"""Mistral without a sliding window: 7B from v0.2 on, Nemo, Small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspec.models.families.base import Family


class Mistral(Family):
    """The plain block, without biases."""

    name = "mistral"

    def flags(self, raw: Mapping[str, Any]) -> dict[str, bool]:
        return {}

    def window(self, raw: Mapping[str, Any]) -> int | None:
        # 4096 is the default of transformers for configs without the field.
        return raw.get("sliding_window", 4096)
