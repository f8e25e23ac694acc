"""What the draft takes from vLLM's target: its fingerprint, and its head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from longspec.config import ModelConfig
from longspec.models.draft import GlideDraft
from longspec.models.draft_files import Fingerprint, load_draft_for
from longspec.models.families import FAMILIES
from longspec.models.layers import Linear, scores
from longspec.models.native_linears import packed
from longspec.models.target import Transformer


class ServedTarget(Protocol):
    """The target as vLLM has loaded it."""

    def embed_input_ids(self, input_ids: Tensor) -> Tensor: ...

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """The head's scores of final hidden states [B, E]."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


Choose = Callable[[Tensor], Tensor]
"""The best token, int64 [B], for hidden states [B, E]."""


def load_for(folder: Path, config: ModelConfig, target: ServedTarget, target_name: str) -> GlideDraft:
    """Read a draft, and check that it was trained for this target."""
    return load_draft_for(folder, config, _fingerprint(config, target), target_name).draft


def _fingerprint(config: ModelConfig, target: ServedTarget) -> Fingerprint:
    """Of the sampled weights vLLM keeps the checkpoint's names; where it does not, the shape must do."""
    held, dtype = dict(target.named_parameters()), next(target.parameters()).dtype
    sources = {ours: theirs[0] for ours, theirs in FAMILIES[config.family].weights(config)}
    with torch.device("meta"):
        names = [name for name, _ in Transformer(config).named_parameters() if name.endswith("norm.weight")]
    found = [held[sources[name]] for name in ("embedding", *names) if sources[name] in held]
    if len(found) != len(names) + 1:
        return Fingerprint.sampled(config, dtype, None, [])
    # vLLM pads the embedding to a multiple of 64 rows; a rank of several has only some of them.
    embedding = found[0][: config.vocab_size] if len(found[0]) >= config.vocab_size else None
    return Fingerprint.sampled(config, dtype, embedding, found[1:])


def choose_with(target: ServedTarget, vocab_ids: Tensor | None) -> Choose:
    """The choice among the draft's vocabulary, or among all tokens."""
    if vocab_ids is None:
        return lambda hidden: target.compute_logits(hidden).argmax(-1)
    plain = _head_rows(target, vocab_ids)
    if plain is None:
        return lambda hidden: vocab_ids[target.compute_logits(hidden)[:, vocab_ids].argmax(-1)]
    rows = Linear(plain.shape[1], len(vocab_ids))
    rows.weight = nn.Parameter(plain, requires_grad=False)
    head = packed(rows)
    return lambda hidden: vocab_ids[scores(head, hidden).argmax(-1)]


def _head_rows(target: ServedTarget, vocab_ids: Tensor) -> Tensor | None:
    """A copy of these rows of the target's head, all of them on each rank; None where the head is quantised
    or kept in a layout of its own."""
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

    head = getattr(target, "lm_head", None)
    weight, held = getattr(head, "weight", None), getattr(head, "shard_indices", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or held is None:
        return None
    places = vocab_ids - held.org_vocab_start_index
    is_own = (places >= 0) & (vocab_ids < held.org_vocab_end_index)
    if len(weight) < held.org_vocab_end_index - held.org_vocab_start_index:
        return None
    rows = weight.detach()[torch.where(is_own, places, 0)] * is_own[:, None]
    if get_tensor_model_parallel_world_size() == 1:
        return rows
    whole: Tensor = tensor_model_parallel_all_reduce(rows)  # each row is zero on all ranks but one
    return whole
