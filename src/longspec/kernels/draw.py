"""Drawing a token from each row of logits by one uniform number: two launches, the logits read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap
from longspec.kernels.noise import uniform

_BLOCK = 4096


@launched
@triton.jit
def _part_kernel(logits, temperatures, highs, sums, places, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """A part's best score, where it stands, and the part's weight relative to it."""
    await_turn(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = part * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * size + i, mask=i < size, other=-float("inf"))
    high = tl.max(score, 0)
    base = tl.where(high == -float("inf"), 0.0, high)
    warm = tl.maximum(tl.load(temperatures + row), 1e-30)
    at = row * tl.num_programs(0) + part
    tl.store(highs + at, high)
    tl.store(sums + at, tl.sum(tl.exp((score - base) / warm), 0))
    tl.store(places + at, tl.min(tl.where(score == high, i, size - 1), 0))


@launched
@triton.jit(do_not_specialize=["num_parts"])
def _pick_kernel(
    logits, temperatures, seeds, positions, highs, sums, places, out, size, num_parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    real = part < num_parts
    high = tl.load(highs + row * num_parts + part, mask=real, other=-float("inf"))
    peak = tl.max(high, 0)
    temperature = tl.load(temperatures + row)
    warm = tl.maximum(temperature, 1e-30)
    weight = tl.load(sums + row * num_parts + part, mask=real, other=0.0) * tl.exp((high - peak) / warm)
    weight = tl.where(weight == weight, weight, 0.0).to(tl.float64)
    up_to = tl.cumsum(weight, 0)
    total = tl.sum(weight, 0)
    goal = uniform(tl.load(seeds + row), tl.load(positions + row), tl.zeros([], tl.int64)) * total
    ours = tl.sum(((up_to <= goal) & real).to(tl.int32), 0)
    # Rounding must not carry it past the last part that has any weight.
    last = tl.max(tl.where(weight > 0, part, 0), 0)
    ours = tl.minimum(ours, last)
    rest = goal - tl.sum(tl.where(part < ours, weight, 0.0), 0)
    i = ours * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * size + i, mask=i < size, other=-float("inf"))
    within = tl.cumsum(tl.exp((score - peak) / warm).to(tl.float64), 0)
    most = tl.max(within, 0)
    rest = tl.minimum(tl.maximum(rest, 0.0), most * (1 - 9.094947017729282e-13))
    drawn = ours * BLOCK + tl.sum((within <= rest).to(tl.int32), 0)
    place = tl.load(places + row * num_parts + part, mask=real, other=2147483647)
    greedy = tl.min(tl.where(high == peak, place, 2147483647), 0)
    tl.store(out + row, tl.where(temperature > 0, drawn, greedy).to(tl.int64))


def draw_tokens(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The token of each row, int64 [B]: what `longspec.data.writer.draw` gives, but for rounding.

    logits are fp32 [B, V], temperatures fp32, seeds and positions int64, those [B].
    """
    B, V = logits.shape
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    block = min(_BLOCK, triton.next_power_of_2(V))
    num_parts = triton.cdiv(V, block)
    highs, sums = torch.empty(2, B, num_parts, dtype=torch.float32, device=logits.device).unbind(0)
    places = torch.empty(B, num_parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(B, dtype=torch.int64, device=logits.device)
    _part_kernel[(num_parts, B)](
        logits, temperatures, highs, sums, places, V, BLOCK=block, num_warps=8, **overlap(logits.device)
    )  # fmt: skip
    _pick_kernel[(B,)](
        logits, temperatures, seeds, positions, highs, sums, places, out, V, num_parts,
        BLOCK=block, PARTS=triton.next_power_of_2(num_parts), num_warps=8, **overlap(logits.device),
    )  # fmt: skip
    return out
