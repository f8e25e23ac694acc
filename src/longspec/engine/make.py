"""An engine of the size that the device has room for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from longspec.engine.engine import Engine
from longspec.engine.load import LoadPlan, load_models
from longspec.engine.memory import page_size, size_engine
from longspec.engine.ranks import Ranks
from longspec.errors import UserError
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.placement import free_memory, memory_explained
from longspec.models.target import Transformer

_SMALLER = "lower max_length, max_rows or kv_memory, or take another device"


def load_engine(
    plan: LoadPlan, devices: tuple[torch.device, ...], progress: bool = False, **settings: Any
) -> Engine:
    """Load models onto one device, or a part of them onto each of several, and make an engine. The settings
    are those of `make_engine`."""
    if len(devices) == 1:
        return make_engine(*load_models(plan, devices[0], progress=progress), **settings)
    ranks = Ranks(devices)
    try:
        shard = ranks.load(plan)
        with ranks.explained():
            models = load_models(plan, devices[0], shard, progress)
        return make_engine(*models, ranks=ranks, **settings)
    except BaseException:
        ranks.close()
        raise


def no_exact(dtype: torch.dtype, device: torch.device) -> UserError:
    name = str(dtype).removeprefix("torch.")
    return UserError(
        f"exact is for our kernels, and they do not run {name} on {device}; "
        "in float32 all methods say the same words without it"
    )


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
    ranks: Ranks | None = None,
) -> Engine:
    """An engine of the size that the device has room for.

    If `exact`, a sequence's numbers have the same bits whatever is computed beside it. `ranks` are the
    processes that hold the other parts of the target.
    """
    config, dtype, device = target.config, target.kv_dtype, target.device
    with torch.inference_mode():
        fused = target.can_fuse
    assert fused or dtype.itemsize > 1, f"plain passes do not write KV in {dtype}"
    if exact and not fused:
        raise no_exact(target.dtype, device)
    if exact and ranks is not None:
        raise UserError("exact does not go with tensor_parallel, whose sums depend on the number of rows")
    page = page_size(dtype, config.head_dim, fused)
    free = free_memory(device) if ranks is None else ranks.room()
    size = size_engine(config, dtype, device, free, page, max_length, max_rows, kv_memory, limit)
    with memory_explained(f"{size.num_tokens} tokens of KV on {device}", _SMALLER):
        return Engine(target, draft, head, acceptance, size=size, exact=exact, ranks=ranks)
