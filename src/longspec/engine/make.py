"""An engine of the size that the device has room for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from longspec.engine.engine import Engine
from longspec.engine.memory import page_size, size_engine
from longspec.errors import UserError
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.placement import free_memory, memory_explained
from longspec.models.target import Transformer

_SMALLER = "lower max_length, max_rows or kv_memory, or take another device"


def make_engine(
    target: Transformer,
    draft: GlideDraft | None = None,
    head: DraftHead | None = None,
    acceptance: Mapping[str, Any] | None = None,
    *,
    max_length: int | None = None,
    limit: int | None = None,
    max_rows: int | None = None,
    kv_memory: int | None = None,
    exact: bool = False,
) -> Engine:
    """An engine of the size that the device has room for.

    If `exact`, what a sequence says does not depend on who is computed beside it, down to the last bit.
    """
    config, dtype, device = target.config, target.kv_dtype, target.device
    with torch.inference_mode():
        fused = target.can_fuse
    if exact and not fused:
        name = str(target.dtype).removeprefix("torch.")
        raise UserError(
            f"exact is for our kernels, and they do not run {name} on {device}; "
            "in float32 all methods say the same words without it"
        )
    page = page_size(dtype, config.head_dim, fused)
    size = size_engine(
        config, dtype, device, free_memory(device), page, max_length, max_rows, kv_memory, limit
    )
    with memory_explained(f"{size.num_tokens} tokens of KV on {device}", _SMALLER):
        return Engine(
            target,
            draft,
            head,
            max_length=size.max_length,
            max_rows=size.max_rows,
            num_pages=size.num_pages,
            page_size=size.page_size,
            acceptance=acceptance,
            exact=exact,
        )
