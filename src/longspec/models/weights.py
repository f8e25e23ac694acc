"""What a target's weights are kept in: as the file has them, or in fewer bytes where a user asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from longspec.config import ModelConfig
from longspec.errors import UserError, check_known
from longspec.models.int8 import has_int8_products
from longspec.models.layers import LinearForm, PackedLinear, replace_linears
from longspec.models.quantised import (
    Bf16Linear,
    Fp16Linear,
    HalfTable,
    Int4Linear,
    Int8Table,
    Int8TargetLinear,
    has_bf16_products,
    has_fp16_products,
    has_int4_products,
)


@dataclass(frozen=True)
class Rounding:
    """How a kind of weights is kept on a CPU."""

    matrix: LinearForm
    head: LinearForm
    table: Callable[[Tensor], nn.Module]
    """Of the embedding."""
    matrix_bytes: float
    """Per weight."""
    table_bytes: float
    is_possible: Callable[[], bool]
    """Whether torch has the products for this processor."""
    rounds_rows: bool = True
    """Whether what a product reads is rounded too."""


ROUNDINGS = {
    "float16": Rounding(
        Fp16Linear, Fp16Linear, partial(HalfTable, dtype=torch.float16), 2, 2, has_fp16_products, False
    ),
    "bfloat16": Rounding(
        Bf16Linear, Bf16Linear, partial(HalfTable, dtype=torch.bfloat16), 2, 2, has_bf16_products
    ),
    "int8": Rounding(Int8TargetLinear, Int8TargetLinear, Int8Table, 1, 1, has_int8_products),
    # An int4 head or embedding would cost more words than it saves bytes.
    "int4": Rounding(Int4Linear, Int8TargetLinear, Int8Table, 0.625, 1, has_int4_products),
}
WEIGHTS = ("auto", "float32", *ROUNDINGS)


@dataclass(frozen=True)
class Precision:
    """The dtype that a target computes in, and the form of its weights."""

    dtype: torch.dtype
    rounding: Rounding | None = None
    """Where the weights are not in `dtype`."""
    name: str = ""
    """Of the rounding."""

    @property
    def weights(self) -> str:
        """What users call it."""
        return self.name or str(self.dtype).removeprefix("torch.")

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of keys and values. If products round their input, a difference in the last bit can grow
        to a whole rounding step. So attention then runs in fp64, where the order of its sums does not change
        the fp32 result."""
        return torch.float64 if self.rounding and self.rounding.rounds_rows else self.dtype

    def weight_bytes(self, config: ModelConfig, device: torch.device) -> int:
        """Of all weights as they are kept."""
        table = config.vocab_size * config.hidden_size
        if self.rounding is None:
            # A packed head cannot be the embedding too.
            copied = device.type == "cpu" and self.dtype == torch.float32 and config.tied_head
            return (config.num_parameters + (table if copied else 0)) * self.dtype.itemsize
        matrices = config.num_parameters - table * (1 if config.tied_head else 2)
        return int(matrices * self.rounding.matrix_bytes + 2 * table * self.rounding.table_bytes)


def pick_precision(weights: str, dtype: torch.dtype, device: torch.device) -> Precision:
    """What `weights` asks for; "auto" leaves them as the file says, in `dtype`."""
    check_known("weights", weights, WEIGHTS)
    plain = Precision(dtype)
    if weights in ("auto", plain.weights):
        return plain
    if device.type != "cpu" or dtype != torch.float32 or weights not in ROUNDINGS:
        raise UserError(
            f"weights {weights!r} do not go with {plain.weights} on {device}: there, use auto or "
            f"{plain.weights}; rounded weights need device cpu and dtype float32"
        )
    rounding = ROUNDINGS[weights]
    if not rounding.is_possible():
        raise UserError(f"weights {weights!r}: torch has no such products for this processor; use auto")
    return Precision(dtype, rounding, weights)


def pack(module: nn.Module, precision: Precision) -> None:
    """Bring every `Linear` below `module` into the form that decoding wants."""
    form = PackedLinear if precision.rounding is None else precision.rounding.matrix
    replace_linears(module, form)
