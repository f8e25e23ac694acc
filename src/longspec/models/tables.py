"""Embeddings in fewer bytes, on a CPU. Linears are in `longspec.models.native_linears`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.models.native_linears import TINY


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
