"""Tensor parallelism for a target that does not fit on one device: each process has some of its heads.

It uses torch's DTensor: the matrices into attention and feed-forward are split by rows, those out of them by
columns. The draft is small, so every process has all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspec.config import ModelConfig
from longspec.errors import UserError
from longspec.models.layers import Block
from longspec.models.target import Transformer


def check_tp(config: ModelConfig, tp_size: int, world_size: int, zero_stage: int) -> None:
    if tp_size < 1 or world_size % tp_size:
        raise UserError(f"tp_size {tp_size} does not divide the {world_size} processes")
    if tp_size == 1:
        return
    if zero_stage == 3:
        raise UserError(
            f"tp_size {tp_size} does not work with ZeRO-3, which splits the target's weights in another way: "
            "use deepspeed=zero1 with tp_size, or tp_size 1 with deepspeed=zero3"
        )
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        if getattr(config, name) % tp_size:
            raise UserError(f"tp_size {tp_size} does not divide the target's {name} {getattr(config, name)}")


def split_target(target: Transformer, tp_size: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Keep this process's share of the target's heads; returns what joins KV heads [B, T, K, D] again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    shape = (dist.get_world_size() // tp_size, tp_size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))["tensor"]
    for block in target.blocks:
        assert isinstance(block, Block)
        _group_rows(block, tp_size)
    plan = {
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(),
        "blocks.*.ffn.gate_up": ColwiseParallel(),
        "blocks.*.ffn.down": RowwiseParallel(),
    }
    parallelize_module(target, mesh, plan)
    for block in target.blocks:
        assert isinstance(block, Block)
        block.attention.num_heads //= tp_size
        block.attention.num_kv_heads //= tp_size
    target.requires_grad_(False).to(device)
    group = mesh.get_group()

    def whole(heads: Tensor) -> Tensor:
        parts = [torch.empty_like(heads) for _ in range(tp_size)]
        dist.all_gather(parts, heads.contiguous(), group=group)
        return torch.cat(parts, 2)

    return whole


def _group_rows(block: Block, tp_size: int) -> None:
    """Order the rows of joined matrices so that each process's queries, keys and values are one part."""
    attention = block.attention
    sizes = [attention.num_heads * attention.head_dim] + 2 * [attention.num_kv_heads * attention.head_dim]
    _reorder(attention.qkv, sizes, tp_size)
    _reorder(block.ffn.gate_up, 2 * [block.ffn.gate_up.weight.shape[0] // 2], tp_size)


def _reorder(linear: nn.Linear, sizes: Sequence[int], tp_size: int) -> None:
    def grouped(joined: Tensor) -> nn.Parameter:
        parts = [part.chunk(tp_size) for part in joined.detach().split(list(sizes))]
        rows = torch.cat([part[rank] for rank in range(tp_size) for part in parts])
        return nn.Parameter(rows, requires_grad=False)

    linear.weight = grouped(linear.weight)
    if linear.bias is not None:
        linear.bias = grouped(linear.bias)
