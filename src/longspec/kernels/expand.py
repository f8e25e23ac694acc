"""A matrix of 8-bit weights for the products of many rows: multiplied by its scales, in half precision."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap

_MOST_AT_ONCE = 4096


@launched
@triton.jit
def _expand_kernel(
    values, scales, out, num_in, num_runs, run, BLOCK: tl.constexpr, RUNS: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_in
    value = tl.load(values + row * num_in + i, mask=inside, other=0.0)
    if RUNS:
        scale = tl.load(scales + row * num_runs + i // run, mask=inside, other=0.0)
    else:
        scale = tl.load(scales + row)
    # Only now: the product before may still read what `out` held.
    await_turn(OVERLAP)
    expanded = value.to(tl.float32) * scale
    tl.store(out + row * num_in + i, expanded.to(out.dtype.element_ty), mask=inside)


def expand(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [out, in] times scales [out, runs], rounded once to `dtype`."""
    num_out, num_in = values.shape
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    block = min(_MOST_AT_ONCE, triton.next_power_of_2(num_in))
    num_runs = scales.shape[1]
    _expand_kernel[(num_out, triton.cdiv(num_in, block))](
        values, scales, out, num_in, num_runs, num_in // num_runs, BLOCK=block, RUNS=num_runs > 1,
        num_warps=4, **overlap(values.device),
    )  # fmt: skip
    return out
