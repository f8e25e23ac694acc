"""The target: one module for every family; `longspec.models.families` says which flags each one sets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longspec.attention import Attention, choose_backend
from longspec.config import ModelConfig
from longspec.models.layers import Block, ForwardPass, Linear, RMSNorm, Table, scores
from longspec.models.rope import RopeTable
from longspec.models.sharding import Shard, SharedTable
from longspec.models.weights import Precision


class Transformer(nn.Module):
    """A decoder-only model. The `ForwardPass` decides what its tokens attend to."""

    def __init__(self, config: ModelConfig, attention: Attention | None = None) -> None:
        super().__init__()
        self.config = config
        self.attention = attention or choose_backend()
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.rounded_embedding: nn.Module | None = None
        """What stands for the embedding, which is empty then, beside rounded weights."""
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.head = Linear(config.hidden_size, config.vocab_size)
        if config.tied_head:
            self.head.weight = self.embedding
        self.precision: Precision | None = None
        """The types of the weights and of the KV. None: both have the dtype in which the target computes."""
        self.rope = RopeTable(config.rope, config.head_dim)
        self.shard: Shard | None = None
        """Which part of the target this process holds; None: all of it."""

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.norm.weight.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of keys and values; see `Precision.kv_dtype`."""
        return self.dtype if self.precision is None else self.precision.kv_dtype

    @property
    def weights(self) -> str:
        """What its weights are kept in."""
        return (self.precision or Precision(self.dtype)).weights

    @property
    def kv(self) -> str:
        """What users call the type of its keys and values."""
        return (self.precision or Precision(self.dtype)).kv

    @property
    def table(self) -> Table:
        """What gives the rows of tokens."""
        if self.shard is not None:
            return SharedTable(self.embedding, self.shard)
        return self.embedding if self.rounded_embedding is None else self.rounded_embedding

    @property
    def whole_config(self) -> ModelConfig:
        """The target's shape, whatever part of it this process holds."""
        return self.config if self.shard is None else self.shard.whole

    @property
    def first_block(self) -> Block:
        """The others are like it."""
        block = self.blocks[0]
        assert isinstance(block, Block)
        return block

    @property
    def can_fuse(self) -> bool:
        """Whether our own kernels can do all of a round. They read weights directly, so each must be a plain
        tensor: in training ZeRO-3 leaves empty ones, and tensor parallelism torch's own kind of shares."""
        is_whole = all(type(weight.data) is Tensor and weight.numel() for weight in self.parameters())
        return is_whole and self.attention.can_fuse(self.embedding, self.config.head_dim)

    def forward(self, tokens: Tensor, run: ForwardPass) -> Tensor:
        """Hidden states [B, T, E], after the last norm, of tokens [B, T]."""
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        stream, _ = run.ops.embed(tokens, self.table, None, blocks[0].reader)
        return run.ops.finish(run.through(blocks, stream), self.norm)

    def logits(self, hidden: Tensor, exact: bool = False) -> Tensor:
        """Scores over the vocabulary in fp32, for hidden states from `forward`; see `scores`."""
        return self.joined(scores(self.head, hidden, exact), self.config.vocab_size)

    def joined(self, part: Tensor, size: int) -> Tensor:
        """The scores [..., size] of which this process has computed a part."""
        return part if self.shard is None else self.shard.join(part, size)

    def agree(self, value: Tensor) -> Tensor:
        """The same value in all processes that share this target: that of rank 0."""
        return value if self.shard is None else self.shard.agree(value)
