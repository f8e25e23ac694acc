"""The target: Llama, Qwen2 and Qwen3 as one module over a KV cache."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.attention import Attention, choose_backend
from longspec.cache import KVCache
from longspec.config import ModelConfig
from longspec.models.layers import Block, CachedPass, ForwardPass, Linear, RMSNorm, scores
from longspec.models.rope import RopeTable


class Transformer(nn.Module):
    """A decoder-only model. New tokens are given with the cache that holds their prefix."""

    def __init__(self, config: ModelConfig, attention: Attention | None = None) -> None:
        super().__init__()
        self.config = config
        self.attention = attention or choose_backend()
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.head = Linear(config.hidden_size, config.vocab_size)
        if config.tied_head:
            self.head.weight = self.embedding
        self.rope = RopeTable(config.rope, config.head_dim)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights and of the cache."""
        return self.embedding.dtype

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """An empty cache for this model, on its device and in its type."""
        first = self.blocks[0]
        assert isinstance(first, Block)
        # Its own count of heads: tensor parallelism leaves it a share of the target's.
        shape = replace(self.config, num_kv_heads=first.attention.num_kv_heads)
        return KVCache.empty(shape, num_rows, capacity, self.device, self.dtype)

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | ForwardPass,
        tree: Tensor | None = None,
        sinks: int = 0,
        window: int | None = None,
    ) -> Tensor:
        """Hidden states [B, T, E], after the last norm, of T new tokens [B, T] per row.

        The tokens follow each row's prefix: as a chain, or, where `tree` is given, as nodes of which
        `tree` [T, T] or [B, T, T] says which other nodes each one sees (itself and its ancestors), so
        that a node's depth is the number of nodes it sees less one. Their keys and values are written
        past the prefix; the prefix itself is not moved: that is for the cache's verbs. With a `window`, of
        the prefix only its first `sinks` entries and its last `window` ones are attended to.

        Training has no prefix: it gives a `ForwardPass` of its own in the cache's place.
        """
        run = self._follow(cache, tokens, tree, sinks, window) if isinstance(cache, KVCache) else cache
        if isinstance(run, CachedPass) and self.attention.fuses(self.embedding):
            from longspec.models.fused import run_blocks

            entries = run.slots[1].contiguous()
            positions = run.positions.expand_as(entries).contiguous()
            return run_blocks(self, tokens, run.cache, positions, entries, run.plan)
        x = F.embedding(tokens, self.embedding)
        for block in self.blocks:
            x = block(x, run)
        return self.norm(x)

    def _follow(
        self, cache: KVCache, tokens: Tensor, tree: Tensor | None, sinks: int, window: int | None
    ) -> CachedPass:
        T = tokens.shape[1]
        depths = torch.arange(T, device=tokens.device) if tree is None else tree.sum(-1) - 1
        positions = cache.lengths[:, None] + depths
        self.rope.reserve(cache.capacity)
        plan = self.attention.plan(cache.lengths, T, tree, sinks, window)
        return CachedPass(cache, cache.slots(T), positions, self.rope, self.attention, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary in fp32, of hidden states that `forward` returned."""
        return scores(self.head, hidden)
