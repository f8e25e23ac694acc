"""A target's weights in fewer bytes, on a CPU: forms of a `Linear` and of the embedding.

Decoding one sequence takes as long as reading the weights. The product of a row has the same bits in any
batch, so a tree's node gets the numbers of a vanilla step: torch's kernels add each row in the same order in
any batch. int8 is in `longspec.models.native`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.models.layers import CpuLinear, Linear
from longspec.models.native import TINY, has_native_products

GROUP = 32
"""Weights of a row that share an int4 scale and zero; as in a GGUF."""


class RoundedLinear(CpuLinear):
    """A frozen `Linear` on the CPU with rounded weights. Its input and its result are fp32."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.num_out, self.num_in = linear.weight.shape
        self.bias = None if linear.bias is None else linear.bias.detach().clone()

    @staticmethod
    def supports(linear: Linear) -> bool:
        """Whether `linear` has this form; that the processor has it is checked before anything is loaded."""
        return linear.weight.device.type == "cpu" and linear.weight.dtype == torch.float32

    def forward(self, x: Tensor) -> Tensor:
        product = self.multiply(x.reshape(-1, self.num_in))
        product = product if self.bias is None else product.add_(self.bias)
        return product.view(*x.shape[:-1], self.num_out)

    def multiply(self, rows: Tensor) -> Tensor:
        """The product of rows [R, in] alone."""
        raise NotImplementedError

    def weight_rows(self, ids: Tensor | None) -> Tensor:
        """Rows of the weight as they are used, in fp32; all of them for None."""
        raise NotImplementedError


class Fp16Linear(RoundedLinear):
    """Weights in fp16; rows stay in fp32."""

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        self._packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), None)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(total)

    def multiply(self, rows: Tensor) -> Tensor:
        product: Tensor = _FP16_PRODUCT(rows, self._packed)
        return product

    def weight_rows(self, ids: Tensor | None) -> Tensor:
        weight = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return (weight if ids is None else weight[ids]).float()


class Bf16Linear(RoundedLinear):
    """Weights and rows in bf16."""

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().bfloat16(), 8)

    def multiply(self, rows: Tensor) -> Tensor:
        product: Tensor = _BF16_PRODUCT(rows.bfloat16(), self._weight, None, "none", [], "")
        return product.float()

    def weight_rows(self, ids: Tensor | None) -> Tensor:
        weight = self._weight.to_dense()
        return (weight if ids is None else weight[ids]).float()


class Int4Linear(RoundedLinear):
    """4-bit weights. Each group of 32 has one bf16 scale and one bf16 zero point. Inputs are rounded to bf16.

    The 4-bit values of a GGUF are kept; only its scales are rounded.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        groups = linear.weight.detach().unflatten(1, (-1, GROUP))
        low, high = groups.aminmax(dim=2, keepdim=True)
        scales = ((high - low) / 15).clamp_(min=TINY).bfloat16().float().clamp_(min=TINY)
        # A weight is (value - 8) * scale + zero.
        zeros = (low + 8 * scales).bfloat16().float()
        values = ((groups - zeros) / scales + 8).round_().clamp_(0, 15).to(torch.int32)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.flatten(1), 1)
        self._scales = torch.cat((scales, zeros), 2).transpose(0, 1).contiguous().bfloat16()

    @staticmethod
    def supports(linear: Linear) -> bool:
        """Whether the kernel has such sizes too."""
        num_out, num_in = linear.weight.shape
        return RoundedLinear.supports(linear) and num_in % GROUP == 0 and num_out % 64 == 0

    def multiply(self, rows: Tensor) -> Tensor:
        product: Tensor = _INT4_PRODUCT(rows.bfloat16(), self._packed, GROUP, self._scales)
        return product.float()

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


_FP16_PRODUCT = torch.ops.quantized.linear_dynamic_fp16.default
_BF16_PRODUCT = torch.ops.mkldnn._linear_pointwise.default
_INT4_PRODUCT = torch.ops.aten._weight_int4pack_mm_for_cpu.default


def has_fp16_products() -> bool:
    return torch.backends.quantized.engine in ("x86", "fbgemm")


def has_bf16_products() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_int4_products() -> bool:
    """Whether torch has int4 products, and we have int8 ones for the head."""
    return has_native_products() and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
