"""Quantised checkpoints: their weights as they are stored, or expanded.

Each matrix `NAME.weight` has scales beside it: `NAME.weight_scale`, or `NAME.weight_scale_inv` where
transformers' fp8 wrote it (which is multiplied, too). `longspec.models.families.quantisation` says which
checkpoints these are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

from longspec.config import Quantisation
from longspec.errors import UserError
from longspec.models.eight_bit import KINDS, EightBit
from longspec.models.sharding import Cut

TensorReader = Callable[..., Tensor]
"""Gives one tensor by its name in the checkpoint, or the part that a second argument, a `Cut`, says."""


class StoredWeights:
    """The weights that `read` gives; with `quantisation`, some have 8 bits."""

    def __init__(self, read: TensorReader, quantisation: Quantisation | None) -> None:
        self._read, self._quantisation = read, quantisation

    def tensor(self, name: str, *cut: Cut) -> Tensor:
        """A weight as a plain tensor: as it is stored or, if it is quantised, in fp32. With `cut`, a part of
        one that is not quantised."""
        matrix = self.eight_bit(name)
        return self._read(name, *cut) if matrix is None else matrix.expanded(torch.float32)

    def joined(self, names: tuple[str, ...]) -> EightBit | None:
        """Matrices on top of each other, if all of them are stored in 8 bits of one kind."""
        parts = [self.eight_bit(name) for name in names]
        known = [part for part in parts if part is not None]
        return EightBit.joined(known) if len(known) == len(parts) else None

    def eight_bit(self, name: str) -> EightBit | None:
        """A matrix as it is stored; None if it is not quantised."""
        scheme = self._quantisation
        if scheme is None or not name.endswith(("_proj.weight", "lm_head.weight")):
            return None
        if scheme.packed:
            if _is_named(name.removesuffix(".weight"), scheme.plain):
                return None
            values = _unpack(name, self._read(f"{name}_packed"), self._read(f"{name}_shape"))
        else:
            values = self._read(name)
        if values.dtype.itemsize > 1:
            return None
        if values.dtype != KINDS[scheme.kind] or values.ndim != 2:
            raise UserError(
                f"weight {name!r} is a {values.ndim}-dimensional {str(values.dtype).removeprefix('torch.')}; "
                f"its quantization_config says {scheme.kind}"
            )
        if values.dtype == torch.float8_e4m3fn and bool((values.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise UserError(f"weight {name!r} has values that are not finite; fetch the weights again")
        scale = name + scheme.suffix
        return EightBit(values, _scales(scale, self._read(scale), values.shape, scheme.block))


def _is_named(module: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern is the name of the module, or after "re:" a regular expression of its beginning."""
    try:
        return any(
            re.match(one[3:], module) is not None if one.startswith("re:") else one == module
            for one in patterns
        )
    except re.error as error:
        raise UserError(f"quantization_config has an 'ignore' that is no pattern: {error}") from error


def _unpack(name: str, packed: Tensor, shape: Tensor) -> Tensor:
    """Bytes that stand in 32-bit words, each with 128 added."""
    num_out, num_in = shape.tolist() if shape.numel() == 2 else (0, 0)
    if packed.dtype != torch.int32 or packed.shape != (num_out, -(-num_in // 4)):
        raise UserError(
            f"weight '{name}_packed' is a {str(packed.dtype).removeprefix('torch.')} of shape "
            f"{tuple(packed.shape)}, which does not fit '{name}_shape' {shape.tolist()}"
        )
    return packed.contiguous().view(torch.uint8)[:, :num_in].bitwise_xor(0x80).view(torch.int8)


def _scales(name: str, stored: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """The scales as fp32 [out, runs]."""
    (num_out, num_in), scales = shape, stored.float()
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise UserError(f"scale {name!r} has values that are not numbers above 0; fetch the weights again")
    if scales.numel() == 1:
        return scales.view(1, 1).expand(num_out, 1).contiguous()
    if block is not None and scales.shape == (-(-num_out // block[0]), -(-num_in // block[1])):
        # Runs of equal lengths, also where the last block is not whole.
        run = math.gcd(num_in, block[1])
        rows = scales.repeat_interleave(block[0], 0)[:num_out]
        return rows.repeat_interleave(block[1] // run, 1)[:, : num_in // run].contiguous()
    columns = scales[:, None] if scales.ndim == 1 else scales
    if columns.ndim != 2 or len(columns) != num_out or num_in % max(1, columns.shape[1]):
        raise UserError(
            f"scale {name!r} has shape {tuple(stored.shape)}, which does not fit a weight of {tuple(shape)}"
        )
    return columns.contiguous()
