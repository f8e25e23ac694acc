"""Weights of 8 bits, for a GPU: int8 or fp8 (e4m3), with a scale per row or per run of weights in a row.

Few rows are multiplied by our kernels, which read the 8 bits and scale the sums. Rows stay in bf16 or fp16,
or are rounded to 16 bits with a scale of their own for int8 (`longspec.kernels.planes`). For many rows, a
matrix is expanded to the rows' dtype right before its product and dropped right after it: arithmetic bounds
such a product, the memory is that of one matrix, and rows are not rounded to 8 bits as `torch._scaled_mm`
would round them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.models.layers import Linear, wide_product

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# This many rows of a matrix are in fp32 at a time while they are rounded, and of a head while it is expanded.
_ROWS = 16384


@dataclass(frozen=True)
class EightBit:
    """A matrix in 8 bits."""

    values: Tensor
    """int8 or float8_e4m3fn [out, in]"""
    scales: Tensor
    """fp32 [out, runs]: a weight is its value times the scale of its run; the runs of a row have equal
    lengths."""

    @classmethod
    def rounded(cls, weight: Tensor, kind: torch.dtype) -> EightBit:
        """A matrix rounded by one scale per row."""
        values = torch.empty_like(weight, dtype=kind)
        scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
        for start in range(0, len(weight), _ROWS):
            rows = weight[start : start + _ROWS].float()
            scale = rows.abs().amax(1, keepdim=True).div_(_LARGEST[kind])
            scale.masked_fill_(scale == 0, 1.0)
            rows = rows / scale
            values[start : start + _ROWS] = (rows.round_() if kind == torch.int8 else rows).to(kind)
            scales[start : start + _ROWS] = scale
        return cls(values, scales)

    @classmethod
    def joined(cls, parts: list[EightBit]) -> EightBit | None:
        """Matrices on top of each other; None if they differ in their type or in their runs."""
        if len({(part.values.dtype, part.scales.shape[1]) for part in parts}) > 1:
            return None
        # As bytes, because torch cannot join fp8 everywhere.
        values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(parts[0].values.dtype)
        return cls(values, torch.cat([part.scales for part in parts]))

    @property
    def fits_kernels(self) -> bool:
        """Whether our kernels have tiles for its runs."""
        run = self.values.shape[1] // self.scales.shape[1]
        return self.scales.shape[1] == 1 or (run >= 16 and run & (run - 1) == 0)

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """The matrix itself."""
        if self.values.is_cuda:
            from longspec.kernels.expand import expand

            return expand(self.values, self.scales, dtype)
        matrix = self.values.to(dtype)
        matrix.unflatten(1, (self.scales.shape[1], -1)).mul_(self.scales[:, :, None])
        return matrix


class EightBitLinear(nn.Module):
    """A frozen `Linear` with weights of 8 bits."""

    values: Tensor
    scales: Tensor

    def __init__(self, matrix: EightBit, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("values", matrix.values)
        self.register_buffer("scales", matrix.scales)
        self.bias = bias
        self.dtype = dtype
        """That of the rows that it multiplies."""

    @property
    def matrix(self) -> EightBit:
        return EightBit(self.values, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and self.covers(x):
            return self._product(x)
        return F.linear(x, self.matrix.expanded(x.dtype), self.bias)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """Add the product of x [..., in] to `total` [..., out], in place if possible."""
        if self.bias is not None or not total.is_contiguous():
            return total + self(x)
        weight = self.matrix.expanded(x.dtype)
        total.view(-1, total.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.T)
        return total

    def weight_rows(self, ids: Tensor | None) -> Tensor:
        return (self.matrix if ids is None else self._rows(ids)).expanded(self.dtype)

    def with_rows(self, ids: Tensor) -> EightBitLinear:
        """The linear of these rows of weights, without a bias."""
        return EightBitLinear(self._rows(ids), None, self.dtype)

    def covers(self, x: Tensor) -> bool:
        from longspec.kernels.linear import covers_bytes

        return covers_bytes(x)

    def folds(self, num_rows: int, exact: bool) -> bool:
        """Whether the kernel that makes the stream should prepare for the norm of `few_rows`."""
        from longspec.kernels.linear import folds
        from longspec.kernels.planes import uses_planes

        in_planes = uses_planes(self.dtype, self.values, self.scales)  # which the norm's own launch makes
        return not in_planes and folds(num_rows, self.values, exact, self.dtype)

    def few_rows(self, x: Any, **around: Any) -> tuple[Any, Any]:
        """The product of few rows, with the options of `longspec.kernels.linear.few_rows`."""
        from longspec.kernels.linear import few_rows

        return few_rows(x, self.values, self.bias, scales=self.scales, **around)

    def scores(self, hidden: Tensor, exact: bool) -> Tensor:
        """The product in fp32; see `longspec.models.layers.scores`."""
        if exact or (hidden.is_cuda and self.covers(hidden)):
            return self._product(hidden, exact=exact, dtype=torch.float32)
        starts = range(0, len(self.values), _ROWS)
        parts = (self._rows(slice(start, start + _ROWS)).expanded(hidden.dtype) for start in starts)
        return torch.cat([wide_product(hidden, part) for part in parts], -1)

    def _product(self, x: Tensor, **around: Any) -> Tensor:
        from longspec.kernels.norm import Residual

        product: Tensor = self.few_rows(Residual(x), **around)[0].x
        return product

    def _rows(self, ids: Tensor | slice) -> EightBit:
        values = self.values.view(torch.uint8)[ids].view(self.values.dtype)
        return EightBit(values, self.scales[ids])


@dataclass(frozen=True)
class EightBitForm:
    """Makes a `Linear` an `EightBitLinear` by rounding its weights."""

    kind: torch.dtype

    def __call__(self, linear: Linear) -> EightBitLinear:
        weight = linear.weight.detach()
        return EightBitLinear(EightBit.rounded(weight, self.kind), linear.bias, weight.dtype)


def form_of(module: nn.Module) -> EightBitForm | None:
    """The form of the first linear in `module` that has weights of 8 bits; None if none has."""
    kinds = (one.values.dtype for one in module.modules() if isinstance(one, EightBitLinear))
    kind = next(kinds, None)
    return None if kind is None else EightBitForm(kind)
