"""What a target's weights are kept in: as the file has them, or in fewer bytes where a user asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from longspec.attention import Attention
from longspec.attention.base import copies_whole
from longspec.config import ModelConfig, Quantisation
from longspec.errors import UserError, check_known
from longspec.models.eight_bit import KINDS, EightBitForm
from longspec.models.layers import LinearForm, replace_linears
from longspec.models.native_linears import EIGHT_BITS, FOUR_BITS, FloatForm, has_native_products, packed
from longspec.models.tables import HalfTable, Int8Table
from longspec.native.build import what_is_missing


@dataclass(frozen=True)
class Rounding:
    """How a kind of weights is kept."""

    matrix: LinearForm
    head: LinearForm
    table: Callable[[Tensor], nn.Module] | None
    """Of the embedding; None leaves it as it is."""
    matrix_bytes: float
    """Per weight."""
    table_bytes: float
    """Per weight of the head, and of the embedding if that is rounded."""


def _half(dtype: torch.dtype) -> Rounding:
    form, table = FloatForm(dtype, rounds=True), partial(HalfTable, dtype=dtype)
    return Rounding(form, form, table, 2, 2)


# On a CPU.
ROUNDINGS = {
    "float16": _half(torch.float16),
    "bfloat16": _half(torch.bfloat16),
    "int8": Rounding(EIGHT_BITS, EIGHT_BITS, Int8Table, 1 + 8 / 64, 1 + 8 / 64),
    # An int4 head or embedding would cost more words than it saves bytes.
    "int4": Rounding(FOUR_BITS, EIGHT_BITS, Int8Table, 1 / 2 + 8 / 32, 1 + 8 / 64),
}
# On a GPU, by our kernels. The embedding stays as it is: a step reads only a few of its rows.
GPU_ROUNDINGS = {
    name: Rounding(EightBitForm(kind), EightBitForm(kind), None, 1, 1) for name, kind in KINDS.items()
}
# Bytes per weight of matrices on a CPU, by their type in the file (`matrix_types`); others take 4. On grids
# (`on_grids`) a weight takes a byte or half of one, and each run of 32 or 16 weights takes 8 more, or 4 if
# fp16 has its step and base. Only loading can find that a K type is off its grids: if its `dmin` is more than
# 128 times its `d`. Weights around 0 do not have such minima.
_GRID_BYTES = (
    dict.fromkeys(("Q4_0", "Q4_1"), 1 / 2 + 4 / 32)
    | {"Q4_K": 1 / 2 + 8 / 32, "Q5_K": 1 + 8 / 32}
    | dict.fromkeys(("Q5_0", "Q5_1", "Q8_0"), 1 + 4 / 32)
    | dict.fromkeys(("Q2_K", "Q3_K", "Q6_K"), 1 + 8 / 16)
)
_KEPT_BYTES = _GRID_BYTES | dict.fromkeys(("float16", "bfloat16"), 2.0)
WEIGHTS = ("auto", "float32", *ROUNDINGS, "fp8")
KV_DTYPES = ("auto", "fp8")
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Precision:
    """The dtype in which a target computes, and the types in which its weights and its KV are kept."""

    dtype: torch.dtype
    rounding: Rounding | None = None
    """Where weights are rounded from `dtype`."""
    name: str = ""
    """What the weights are in, if that is not `dtype`. Without a rounding, only the weights that a checkpoint
    stores so."""
    kv_name: str = ""
    """What keys and values are in, if a user asks for fewer bytes."""
    matrix_bytes: float | None = None
    """Per weight of matrices and head, if a CPU keeps them in fewer bytes than `dtype` without rounding them,
    or keeps the grids that a file has."""

    @property
    def weights(self) -> str:
        """What users call it."""
        return self.name or str(self.dtype).removeprefix("torch.")

    @property
    def kept_as(self) -> str:
        """`weights`, and the bytes of matrices if they have fewer."""
        if self.matrix_bytes is None:
            return self.weights
        return f"{self.weights} (matrices: about {self.matrix_bytes:.3g} bytes per weight)"

    @property
    def kv(self) -> str:
        """What users call the type of keys and values."""
        return self.kv_name or str(self.kv_dtype).removeprefix("torch.")

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return KINDS[self.kv_name] if self.kv_name else self.dtype

    @property
    def stored_kind(self) -> torch.dtype | None:
        """The type of a checkpoint's weights that are kept as they are stored."""
        kept = self.rounding is None or self.rounding in GPU_ROUNDINGS.values()
        return KINDS.get(self.name) if kept else None

    def weight_bytes(self, config: ModelConfig, device: torch.device) -> int:
        """Of all weights as they are kept."""
        table = config.vocab_size * config.hidden_size
        if self.rounding is None and self.name:
            tables = table * (1 if config.tied_head else 2)
            return config.num_parameters - tables + tables * self.dtype.itemsize
        if self.rounding is not None and self.matrix_bytes is not None:
            matrices = config.num_parameters - (0 if config.tied_head else table)
            return int(matrices * self.matrix_bytes) + table + 4 * config.vocab_size  # a scale for each row
        if self.rounding is None:
            # A packed head cannot be the embedding too.
            copied = device.type == "cpu" and self.dtype == torch.float32 and config.tied_head
            matrices = config.num_parameters - (0 if copied else table)
            plain = self.dtype.itemsize
            return int(matrices * (self.matrix_bytes or plain)) + table * plain
        matrices = config.num_parameters - table * (1 if config.tied_head else 2)
        head = self.rounding.table_bytes
        embedding = head if self.rounding.table else self.dtype.itemsize
        return int(matrices * self.rounding.matrix_bytes + table * (head + embedding))


def pick_precision(
    weights: str,
    dtype: torch.dtype,
    device: torch.device,
    quantisation: Quantisation | None = None,
    matrix_types: Mapping[str, int] = MappingProxyType({}),
) -> Precision:
    """What `weights` asks for; "auto" leaves them as the file says: in `dtype` or, on a GPU, in the 8 bits
    of a quantised checkpoint. `matrix_types` says how many weights of each type the file has."""
    check_known("weights", weights, WEIGHTS)
    plain = Precision(dtype, matrix_bytes=_matrix_bytes(matrix_types, dtype, device))
    on_gpu = device.type == "cuda" and dtype != torch.float32
    if weights == "auto" and on_gpu and quantisation is not None:
        _check_capability("weights", quantisation.kind, device)
        return Precision(dtype, None, quantisation.kind)
    if weights in ("auto", plain.weights):
        return plain
    if on_gpu and weights in GPU_ROUNDINGS:
        _check_capability("weights", weights, device)
        return Precision(dtype, GPU_ROUNDINGS[weights], weights)
    if device.type != "cpu" or dtype != torch.float32 or weights not in ROUNDINGS:
        raise UserError(
            f"weights {weights!r} do not go with {plain.weights} on {device}: there, use auto or "
            f"{plain.weights}; {', '.join(ROUNDINGS)} need device cpu and dtype float32, and "
            f"{', '.join(GPU_ROUNDINGS)} a GPU and dtype bfloat16 or float16"
        )
    rounding = ROUNDINGS[weights]
    if not has_native_products():
        raise UserError(
            f"weights {weights!r} need a C compiler with OpenMP, such as gcc, and there is none "
            f"({what_is_missing()}); use auto"
        )
    if weights != "int8":
        return Precision(dtype, rounding, weights)
    return Precision(
        dtype, rounding, weights, matrix_bytes=_mean_bytes(matrix_types, _GRID_BYTES, rounding.matrix_bytes)
    )


def _matrix_bytes(matrix_types: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> float | None:
    if device.type != "cpu" or dtype != torch.float32 or not has_native_products():
        return None
    mean = _mean_bytes(matrix_types, _KEPT_BYTES, 4.0)
    return mean if mean is not None and mean < 4 else None


def _mean_bytes(matrix_types: Mapping[str, int], kept: Mapping[str, float], otherwise: float) -> float | None:
    total = sum(matrix_types.values())
    return (
        sum(kept.get(one, otherwise) * count for one, count in matrix_types.items()) / total
        if total
        else None
    )


def with_kv_dtype(
    precision: Precision, kv_dtype: str, head_dim: int, device: torch.device, attention: Attention
) -> Precision:
    """`precision` with the keys and values that `kv_dtype` asks for; "auto" leaves them as they are. Refused
    where our kernels do not run, because nothing else reads and writes fp8."""
    check_known("kv_dtype", kv_dtype, KV_DTYPES)
    if kv_dtype == "auto":
        return precision
    with torch.inference_mode():
        fused = attention.can_fuse(torch.empty(0, dtype=precision.dtype, device=device), head_dim)
    if not fused:
        name = str(precision.dtype).removeprefix("torch.")
        raise UserError(
            f"kv_dtype {kv_dtype!r} is for our kernels (attention triton, the default on a GPU), and they do "
            f"not run {name} on {device} here; use auto"
        )
    if not copies_whole(head_dim, KINDS[kv_dtype]):
        raise UserError(
            f"kv_dtype {kv_dtype!r} needs heads whose size is a multiple of 16, and this target's have "
            f"{head_dim}; use auto"
        )
    if device.type == "cuda":
        _check_capability("kv_dtype", kv_dtype, device, "use auto")
    return replace(precision, kv_name=kv_dtype)


def _check_capability(
    option: str, kind: str, device: torch.device, way_out: str = "use int8, or bfloat16 to expand them"
) -> None:
    """Refuse fp8 where the GPU has no instructions for it."""
    if kind != "fp8" or (found := torch.cuda.get_device_capability(device)) >= _FP8_CAPABILITY:
        return
    raise UserError(
        f"{option} 'fp8' needs a GPU of compute capability 8.9 or later, and {device} has "
        f"{found[0]}.{found[1]}; {way_out}"
    )


def pack(module: nn.Module, precision: Precision) -> None:
    """Bring every `Linear` below `module` into the form that decoding wants."""
    replace_linears(module, packed if precision.rounding is None else precision.rounding.matrix)
