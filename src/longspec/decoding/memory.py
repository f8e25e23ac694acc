"""What decoding takes of a device, worked out from shapes alone, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from longspec.cache import DraftCache
from longspec.config import DraftConfig, ModelConfig
from longspec.decoding.auto import NUM_COPIED
from longspec.decoding.device import RoundStore
from longspec.decoding.fill import SIZE
from longspec.decoding.loop import PREFILL_CHUNK
from longspec.models.placement import OVERHEAD, draft_weights, free_memory, plan_memory, total_memory

# Partial results of attention, masks and whatever else of a round does not grow with the vocabulary.
_SMALL = 32 * 2**20


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes, part by part."""

    weights: int
    kv: int
    """The target's KV of all rows, with room for a tree behind each."""
    rope: int
    draft_weights: int
    draft_kv: int
    """Of all rows; the same at every context."""
    graphs: int
    """Reserved for the pools of captured rounds; 0 where rounds are not replayed."""
    working: int
    """Reserved for libraries, the activations of a prefill chunk and the logits."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class MemoryBudget:
    """What is needed, and what the device has."""

    needs: MemoryNeeds
    free: int
    device_total: int

    @property
    def left(self) -> int:
        """Free memory that nothing is planned for; below 0 it does not fit."""
        return self.free - self.needs.total


def plan_decoding(
    config: ModelConfig,
    draft: DraftConfig | None,
    context: int,
    batch: int,
    tree_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> MemoryBudget:
    """The memory of answering `batch` prompts side by side, each of `context` tokens with its answer."""
    target = plan_memory(config, dtype, device)
    on_gpu = device.type == "cuda"
    num_copied = NUM_COPIED if draft is not None and on_gpu else 0
    num_nodes = sum(tree_shape) + 1
    capacity = context + num_nodes + num_copied
    rope = 2 * capacity * config.head_dim * torch.float32.itemsize
    ring = batch * DraftCache.size_of(config, draft, num_nodes, dtype) if draft else 0
    # Each graph that is kept has a pool of its own, which nothing else can use, and the text to copy from;
    # one more takes in prompts.
    pool = graph_pool(config, draft, batch, tree_shape, num_copied, dtype)
    text = batch * capacity * torch.int64.itemsize if num_copied else 0
    filler = _activations(config, batch * SIZE, dtype) + _SMALL if batch * SIZE <= PREFILL_CHUNK else 0
    graphs = RoundStore.MOST * (pool + text) + filler if on_gpu else 0
    needs = MemoryNeeds(
        weights=target.weights,
        kv=batch * capacity * target.kv_per_token,
        rope=rope,
        draft_weights=draft_weights(config, draft, dtype) if draft else 0,
        draft_kv=ring,
        graphs=graphs,
        working=OVERHEAD,
    )
    return MemoryBudget(needs, free_memory(device), total_memory(device))


def graph_pool(
    config: ModelConfig,
    draft: DraftConfig | None,
    batch: int,
    tree_shape: tuple[int, ...],
    num_copied: int,
    dtype: torch.dtype,
) -> int:
    """About the most that one captured round holds at a time: the scores, and the activations of a layer."""
    nodes = batch * (sum(tree_shape) + 1 + num_copied)
    verify = nodes * 2 * 4 * config.vocab_size + _activations(config, nodes, dtype)
    if draft is None:
        return verify + _SMALL
    # Of a level: its scores, those with noise and their log-softmax; and the noise of all levels.
    width = draft.draft_vocab or config.vocab_size
    return verify + batch * 4 * (3 * max(tree_shape) + len(tree_shape)) * width + _SMALL


def _activations(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes that a layer holds of so many tokens."""
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = 3 * config.intermediate_size + 4 * config.hidden_size + 2 * heads * config.head_dim
    return num_tokens * layer * dtype.itemsize
