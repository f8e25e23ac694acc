"""How attention is cut into programs: tile sizes by shape and type, splits by what the GPU holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

# So many multiprocessors the interpreter pretends to have: enough for several splits.
_PRETENDED = 4


@dataclass(frozen=True)
class Tiling:
    """One program's share of an attention problem."""

    num_rows: int
    """Folded query rows of a tile."""
    num_keys: int
    """Keys that are read at a time."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """How many of these programs a multiprocessor holds at once."""


def choose_tiling(num_rows: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """The tile for `num_rows` folded rows. Measured on an H200; see `longspec.bench.attention`."""
    wide = head_dim > 128
    if dtype == torch.float32:  # by plain multiply-add, no tensor cores: small tiles or registers spill
        return Tiling(16, 32, 4, 2, 2)
    if num_rows <= 16:
        return Tiling(16, 64, 4, 3, 2) if wide else Tiling(16, 128, 4, 3, 2)
    if num_rows <= 32:
        return Tiling(32, 64, 4, 3, 1) if wide else Tiling(32, 64, 4, 4, 2)
    if num_rows <= 64:
        return Tiling(64, 64, 4, 2, 1) if wide else Tiling(64, 64, 4, 4, 2)
    return Tiling(128, 64, 8, 2, 1) if wide else Tiling(128, 128, 8, 2, 1)


def choose_splits(num_programs: int, capacity: int, tiling: Tiling, device: torch.device) -> int:
    """Into how many parts the keys are cut when one part takes `num_programs` programs.

    The time is that of the fullest multiprocessor: rounds of programs times the length of each, and a
    little for each part that must be merged.
    """
    sms = _PRETENDED
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    slots = sms * tiling.programs_per_sm
    most = min(triton.cdiv(capacity, tiling.num_keys), max(1, 4 * slots // num_programs))
    return min(
        range(1, most + 1),
        key=lambda splits: triton.cdiv(num_programs * splits, slots) / splits + 0.002 * splits,
    )
