"""An int8 copy of the draft's matrices, for the CPU: by our C code, or by torch where there is no C compiler.

A pass of the draft takes as long as reading its weights. In int8 they need a quarter of the bytes and stay in
the processor's cache between the passes of a round. Rounding changes what is proposed, never what is emitted.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from longspec.errors import UserError, check_known
from longspec.models.eight_bit import EightBitForm, form_of
from longspec.models.layers import CpuLinear, Linear, LinearForm, is_fp32_on_cpu
from longspec.models.native_linears import EIGHT_BITS, TINY, has_native_products

DRAFT_DTYPES = ("auto", "int8", "target")


class Int8Linear(CpuLinear):
    """A frozen `Linear` on the CPU: int8 weights with one scale per row; inputs are rounded at each call."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        # Without VNNI the sum of two products must fit in 16 bits, so weights have 7 bits there.
        self._packed = _pack(linear, 127 if has_vnni() else 63)

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias, approximately."""
        # The kernel refuses nan, which a broken draft may compute; a draft may propose anything.
        result: Tensor = torch.ops.quantized.linear_dynamic(x.nan_to_num(), self._packed)
        return result


def has_int8_products() -> bool:
    """Whether this build of torch has them for this processor."""
    return torch.backends.quantized.engine in ("x86", "fbgemm") and hasattr(torch, "quantize_per_channel")


def _pack(linear: Linear, largest: int) -> Any:
    """The weights rounded to -largest..largest by a scale per row, laid out for the kernel."""
    weight = linear.weight.detach()
    scales = weight.abs().amax(1).clamp(min=TINY).double() / largest
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantize_per_channel.*")
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(rounded, None if linear.bias is None else linear.bias.detach())


def check_draft_dtype(draft_dtype: str) -> None:
    check_known("draft_dtype", draft_dtype, DRAFT_DTYPES)


def pick_draft_form(draft_dtype: str, draft: nn.Module, target: nn.Module) -> LinearForm | None:
    """The form of a draft's linears; None leaves them in the target's dtype.

    "auto" rounds them on a CPU if that is possible, and on a GPU as the target's are rounded.
    """
    check_draft_dtype(draft_dtype)
    if next(draft.parameters()).is_cuda or form_of(target) is not None:
        forms = {"auto": form_of(target), "int8": EightBitForm(torch.int8), "target": None}
        return forms[draft_dtype]
    linears = [child for child in draft.modules() if isinstance(child, Linear)]
    possible = bool(linears) and has_int8_products() and all(map(_can_round, linears))
    if draft_dtype == "int8" and not possible:
        raise UserError(
            "draft_dtype 'int8' needs float32 on an x86 CPU, and finite weights; use 'auto' or 'target'"
        )
    if not possible or draft_dtype == "target":
        return None
    return EIGHT_BITS if has_native_products() else Int8Linear


def _can_round(linear: Linear) -> bool:
    return is_fp32_on_cpu(linear) and bool(torch.isfinite(linear.weight).all())


def has_vnni() -> bool:
    """Whether products of bytes are summed in 32 bits."""
    asked = getattr(torch.cpu, "_is_vnni_supported", None)
    return asked is not None and bool(asked())
