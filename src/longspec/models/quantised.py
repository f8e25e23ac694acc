"""On a CPU: linears with int4 weights, and embeddings in fewer bytes. Linears with int8, bf16 and fp16
weights are in `longspec.models.native_linears`.

Decoding one sequence takes as long as reading the weights. The product of a row has the same bits in any
batch, so a tree's node gets the numbers of a vanilla step: torch's kernel adds each row in the same order in
any batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.models.layers import CpuLinear, Linear, is_fp32_on_cpu
from longspec.models.native_linears import TINY

GROUP = 32
"""Weights of a row that share an int4 scale and zero; as in a GGUF."""


class Int4Linear(CpuLinear):
    """A frozen `Linear` on the CPU with 4-bit weights. Each group of 32 has one bf16 scale and one bf16 zero
    point. Inputs are rounded to bf16; the result is fp32.

    The 4-bit values of a GGUF are kept; only its scales are rounded.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.num_out, self.num_in = linear.weight.shape
        self.bias = None if linear.bias is None else linear.bias.detach().clone()
        groups = linear.weight.detach().unflatten(1, (-1, GROUP))
        low, high = groups.aminmax(dim=2, keepdim=True)
        scales = ((high - low) / 15).clamp_(min=TINY).bfloat16().float().clamp_(min=TINY)
        # A weight is (value - 8) * scale + zero.
        zeros = (low + 8 * scales).bfloat16().float()
        values = ((groups - zeros) / scales + 8).round_().clamp_(0, 15).to(torch.int32)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.flatten(1), 1)
        self._scales = torch.cat((scales, zeros), 2).transpose(0, 1).contiguous().bfloat16()

    @classmethod
    def of(cls, linear: Linear) -> Int4Linear | None:
        """This form of `linear`; None if the kernel does not have such sizes."""
        num_out, num_in = linear.weight.shape
        fits = is_fp32_on_cpu(linear) and num_in % GROUP == 0 and num_out % 64 == 0
        return cls(linear) if fits else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.num_in).bfloat16()
        product: Tensor = _INT4_PRODUCT(rows, self._packed, GROUP, self._scales).float()
        product = product if self.bias is None else product.add_(self.bias)
        return product.view(*x.shape[:-1], self.num_out)

    def weight_rows(self, ids: Tensor | None) -> Tensor:
        raise NotImplementedError("the head is int8 where the other matrices are int4")


class HalfTable(nn.Module):
    """An embedding [V, E] in two bytes."""

    values: Tensor

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("values", table.to(dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.values).float()


class Int8Table(nn.Module):
    """An embedding [V, E] in int8 with a scale per row."""

    values: Tensor
    scales: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        scales = table.abs().amax(1, keepdim=True).clamp_(min=TINY).div_(127)
        self.register_buffer("values", (table / scales).round_().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.values) * F.embedding(tokens, self.scales)


_INT4_PRODUCT = torch.ops.aten._weight_int4pack_mm_for_cpu.default
