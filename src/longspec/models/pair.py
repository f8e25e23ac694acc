"""A target and the draft that is trained for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike, fspath

import torch

from longspec import hub
from longspec.config import DraftConfig, ModelConfig
from longspec.models.checkpoint import WeightFiles
from longspec.models.draft import GlideDraft
from longspec.models.draft_files import load_draft
from longspec.models.files import eos_ids, read_config
from longspec.models.load import load_target
from longspec.models.target import Transformer


@dataclass(frozen=True)
class Pair:
    """Both with plain weights, because no gradients pass through packed ones."""

    target: Transformer
    """Frozen."""
    draft: GlideDraft
    eos_ids: frozenset[int]
    """The tokens that end an answer of the target."""


def load_pair(
    target: str,
    draft: str | PathLike[str] | None,
    draft_config: DraftConfig | Callable[[Transformer], DraftConfig] | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    config: ModelConfig | None = None,
    seed: int | None = None,
) -> Pair:
    """Load a target, with the draft of that name or path, or with a fresh one from `draft_config` and `seed`.

    A `draft_config` that depends on the target's weights is a function of the loaded target. `config`
    replaces the target's own config file.
    """
    folder = hub.resolve(target).folder
    config = config or read_config(folder)
    with WeightFiles(folder) as weights:
        model = load_target(config, weights.tensor, device, dtype, packed=False)
    if draft is None:
        shape = draft_config(model) if callable(draft_config) else draft_config or DraftConfig()
        made = GlideDraft(config, shape)
        made.initialise(None if seed is None else torch.Generator().manual_seed(seed))
        made.to(device=device, dtype=dtype)
    else:
        made = load_draft(hub.resolve_draft(fspath(draft)), model, target).draft
    return Pair(model, made.requires_grad_(True), eos_ids(folder))
