"""How attention is cut into programs: tile sizes by shape and dtype, splits by the size of the GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton

# Multiprocessors and shared memory for the interpreter: enough for a few splits.
_PRETENDED = (4, 230400)
# Shared memory that the compiler needs besides the tiles.
_SPARE = 2048


@dataclass(frozen=True)
class Tiling:
    """One program's share of an attention problem."""

    num_rows: int
    """Folded query rows of a tile."""
    num_keys: int
    """Keys read at a time."""
    num_warps: int
    num_stages: int

    def num_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Shared memory of a program: the queries, and the keys and values in flight."""
        num_entries = self.num_rows + 2 * self.num_stages * self.num_keys
        return num_entries * triton.next_power_of_2(head_dim) * dtype.itemsize


def choose_tiling(num_rows: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tiling:
    """The tile for `num_rows` folded rows: the fastest on an H200, reduced to what the GPU can hold."""
    tiling = _measured(num_rows, head_dim <= 64, head_dim > 128, dtype)
    _, shared = gpu_size(device)
    while tiling.num_bytes(head_dim, dtype) > shared:
        if tiling.num_stages > 2:
            tiling = replace(tiling, num_stages=tiling.num_stages - 1)
        else:
            tiling = replace(tiling, num_keys=tiling.num_keys // 2)
    return tiling


def _measured(num_rows: int, narrow: bool, wide: bool, dtype: torch.dtype) -> Tiling:
    """Measured with `benchmarks/attention.py`."""
    if dtype == torch.float32:  # no tensor cores: with larger tiles registers spill
        return Tiling(16, 16, 8, 2)
    if num_rows <= 16:
        return Tiling(16, 64, 8, 3) if wide else Tiling(16, 128, 4, 3)
    if num_rows <= 32:
        return Tiling(32, 64 if wide else 128, 8, 3)
    if wide:
        return Tiling(64, 64, 8, 3) if num_rows <= 64 else Tiling(128, 64, 8, 2)
    if num_rows <= 128 or narrow:
        return Tiling(64, 128, 4, 3)
    return Tiling(64, 64, 4, 3) if num_rows <= 192 else Tiling(128, 128, 8, 3)


def choose_splits(num_programs: int, capacity: int, tiling: Tiling, device: torch.device) -> int:
    """Into how many parts to cut the keys, if one part takes `num_programs` programs.

    One program fills a multiprocessor's shared memory. So the time is the number of programs that the busiest
    multiprocessor runs, times the length of each, plus a little for each part that must be merged.
    """
    sms, _ = gpu_size(device)
    most = min(triton.cdiv(capacity, tiling.num_keys), max(1, 4 * sms // num_programs))
    return min(
        range(1, most + 1),
        key=lambda splits: triton.cdiv(num_programs * splits, sms) / splits + 0.0003 * splits,
    )


def choose_share(num_programs: int, num_keys: int, block: int, device: torch.device) -> tuple[int, int]:
    """How many of a few keys one program takes, in multiples of `block`, and how many parts that makes: as
    many as there are multiprocessors for."""
    sms, _ = gpu_size(device)
    num_splits = max(1, min(triton.cdiv(num_keys, block), sms // num_programs))
    share = triton.cdiv(triton.cdiv(num_keys, block), num_splits) * block
    return share, triton.cdiv(num_keys, share)


def choose_slice(num_rows: int, num_programs: int, device: torch.device) -> tuple[int, int]:
    """How many numbers of each head's result a merging program computes, and how many parts it reads at once.

    `num_programs` programs share all rows, num_rows of each KV head. The values were fastest on an H200.
    """
    sms, _ = gpu_size(device)
    if 2 * num_programs > sms:
        return 32, 4
    return 16, 16 if num_rows < 16 else 8


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a Hopper GPU or a later one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def copies_tiles(device: torch.device) -> bool:
    """Whether the hardware (Hopper and later) or the interpreter copies whole tiles with descriptors.

    On other GPUs the compiler would turn a descriptor into loads of single numbers.
    """
    return device.type != "cuda" or is_hopper(device)


def can_copy_rows(matrix: torch.Tensor) -> bool:
    """Whether descriptors can describe this matrix: the bytes of a row must be a multiple of 16."""
    return matrix.shape[1] * matrix.itemsize % 16 == 0


def precision(dtype: torch.dtype) -> str:
    """The `input_precision` of `tl.dot`."""
    # For fp32 the default would be TF32, which keeps only ten bits.
    return "ieee" if dtype == torch.float32 else "tf32"


@cache
def gpu_size(device: torch.device) -> tuple[int, int]:
    """The number of multiprocessors, and the bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return _PRETENDED
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["multiprocessor_count"], properties["max_shared_mem"] - _SPARE
