"""Load a target and its draft for an engine: whole, or one rank's part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longspec import hub
from longspec.attention import Attention, choose_backend
from longspec.config import ModelConfig
from longspec.models.checkpoint import WeightFiles
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.draft_files import load_draft
from longspec.models.files import matrix_types, read_config
from longspec.models.int8 import pick_draft_form
from longspec.models.layers import replace_linears
from longspec.models.load import load_target
from longspec.models.native_linears import packed
from longspec.models.placement import gigabytes, memory_explained, pick_dtype
from longspec.models.sharding import Shard
from longspec.models.target import Transformer
from longspec.models.weights import Precision, pick_precision, with_kv_dtype
from longspec.progress import count_bar

# A CPU uses only this many of a draft's tokens, the most frequent ones; the context's own tokens are added.
_CPU_VOCAB = 8192
_SMALLER = "free some memory, or use a smaller dtype, a smaller target or another device"


def read_shape(
    find: Callable[..., hub.TargetFiles],
    device: torch.device,
    dtype: str | torch.dtype,
    weights: str,
    kv_dtype: str,
    backend: Attention,
) -> tuple[hub.ModelEntry | None, ModelConfig, Precision, int]:
    """A target's entry, config, precision and context limit, from its config alone: a target that cannot run
    or fit is refused before its weights are fetched. `find` is `hub.resolve` with the target's name."""
    files = find(config_only=True)
    config = read_config(files.folder, files.config)
    dtype = pick_dtype(dtype, device)
    types = matrix_types(files, config)
    precision = pick_precision(weights, dtype, device, config.quantisation, types)
    precision = with_kv_dtype(precision, kv_dtype, config.head_dim, device, backend)
    return files.entry, config, precision, files.entry.context if files.entry else config.max_length


@dataclass(frozen=True)
class LoadPlan:
    """Which models are loaded, and how. Rank 0 sends it to the other ranks."""

    name: str
    folder: Path
    config: ModelConfig
    precision: Precision
    attention: str = "auto"
    draft: Path | None = None
    draft_dtype: str = "auto"


class Loaded(NamedTuple):
    """The models of an engine."""

    target: Transformer
    draft: GlideDraft | None = None
    head: DraftHead | None = None
    acceptance: dict[str, Any] | None = None
    """The draft's measured acceptance (`longspec.decoding.expected`)."""


def load_models(
    plan: LoadPlan, device: torch.device, shard: Shard | None = None, progress: bool = False
) -> Loaded:
    target = _load_target(plan, device, shard, progress)
    target.attention = choose_backend(plan.attention)
    if plan.draft is None:
        return Loaded(target)
    with memory_explained(f"the draft {plan.draft} next to {plan.name} on {device}", _SMALLER):
        loaded = load_draft(plan.draft, target, plan.name)
        return Loaded(target, *prepare_draft(loaded.draft, target, plan.draft_dtype), loaded.acceptance)


def _load_target(plan: LoadPlan, device: torch.device, shard: Shard | None, progress: bool) -> Transformer:
    config, precision = plan.config, plan.precision
    held = config if shard is None else config.shared_by(shard.size)
    num_bytes = held.num_parameters * precision.dtype.itemsize
    kept = gigabytes(precision.weight_bytes(held, device))
    what = f"the {kept} of {plan.name} in {precision.kept_as} on {device}"
    with (
        memory_explained(what, _SMALLER),
        WeightFiles(plan.folder) as weights,
        count_bar(f"Loading {plan.name}", num_bytes, progress, in_bytes=True) as advance,
    ):
        return load_target(config, weights.tensor, device, precision, advance, shard=shard)


def prepare_draft(
    draft: GlideDraft, target: Transformer, draft_dtype: str = "auto"
) -> tuple[GlideDraft, DraftHead]:
    """The draft, ready for decoding, and its part of the target's head."""
    draft.requires_grad_(False).eval()
    form = pick_draft_form(draft_dtype, draft, target)
    if form is not None:
        replace_linears(draft, form)
    replace_linears(draft, packed)
    if target.shard is not None:
        target.shard.attach_draft(draft)
    ids = draft.vocab_ids
    if ids is not None and target.device.type == "cpu":
        ids = ids[:_CPU_VOCAB]
    return draft, DraftHead(target, ids, form)
