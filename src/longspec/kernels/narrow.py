"""Find the lowest score that top-k keeps, for rows that each have their own k.

Floats of one sign are ordered as their bits are. One turn counts the tokens above each of sixteen thresholds,
which gives four bits of the score, so eight turns give all 32. A row without top-k ends each launch at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap
from longspec.kernels.scores import Scores, is_sampled, row_peak, row_temperature, scaled

_TURNS = 8


@triton.jit
def _num_wanted(given, row, repeat):
    """How many tokens top-k keeps in a row; 0 if it is off."""
    wanted = tl.load(given.top_k + row // repeat)
    return tl.where(is_sampled(given, row, repeat) & (wanted < given.size), wanted, 0).to(tl.int32)


@triton.jit
def _settled(counts, known, row, turn, wanted, num_parts, PARTS: tl.constexpr):
    """The bits known after `turn` turns: at least `wanted` tokens must be at or above the threshold."""
    digit, part = tl.arange(0, 16), tl.arange(0, PARTS)
    place = ((turn % 2 * tl.num_programs(1) + row) * num_parts + part)[:, None] * 16 + digit[None, :]
    totals = tl.sum(tl.load(counts + place, mask=(part < num_parts)[:, None], other=0), 0)
    enough = tl.sum(((totals >= wanted) & (digit > 0)).to(tl.int32), 0)
    return tl.load(known + turn % 2 * tl.num_programs(1) + row) | (enough << (32 - 4 * turn))


@launched
@triton.jit(do_not_specialize=["turn", "num_parts", "num_peaks", "repeat", "depth"])
def _narrow_kernel(
    given, peaks, counts, known, turn, num_parts, num_peaks, repeat, depth,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, PEAKS: tl.constexpr,
    PENALTY: tl.constexpr, PATH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Count the tokens of a part above each of the next sixteen thresholds."""
    await_turn(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wanted = _num_wanted(given, row, repeat)
    if wanted <= 0:
        return
    bits = tl.zeros([], tl.int32)
    if turn > 0:
        bits = _settled(counts, known, row, turn, wanted, num_parts, PARTS)
    # Two buffers alternate: the next turn reads what this one writes, while no program reads it.
    ours = (turn + 1) % 2 * tl.num_programs(1) + row
    if part == 0:
        tl.store(known + ours, bits)
    peak = row_peak(peaks, row, num_peaks, PEAKS)
    digit = tl.arange(0, 16)
    lowest = bits.to(tl.uint32)
    highest = lowest | (tl.full([], 0xFFFFFFFF, tl.uint32) >> (4 * turn).to(tl.uint32))
    threshold = lowest + (digit.to(tl.uint32) << (28 - 4 * turn))
    total = tl.zeros([16], tl.int32)
    # Skip a part whose best score is below all thresholds: after a few turns that is nearly every part.
    blocks = part * BLOCKS + tl.arange(0, BLOCKS)
    own = tl.load(peaks + row * num_peaks + blocks, mask=blocks < num_peaks, other=-float("inf"))
    best = tl.div_rn(tl.max(own, 0) - peak, row_temperature(given, row, repeat))
    reaches = (0x7FFFFFFF - tl.abs(best).to(tl.int32, bitcast=True)).to(tl.uint32) >= lowest
    for block in tl.range(0, tl.where(reaches, BLOCKS, 0)):
        i = (part * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        score = scaled(given, row, i, peak, repeat, depth, PENALTY, PATH)
        height = (0x7FFFFFFF - tl.abs(score).to(tl.int32, bitcast=True)).to(tl.uint32)
        # A score above all thresholds counts for each of them; after a few turns, few scores are in between.
        total += tl.sum(((height > highest) & (i < given.size)).to(tl.int32), 0)
        between = (height >= lowest) & (height <= highest) & (i < given.size)
        if tl.max(between.to(tl.int32), 0) > 0:
            above = (height[None, :] >= threshold[:, None]) & between[None, :]
            total += tl.sum(above.to(tl.int32), 1)
    tl.store(counts + (ours * num_parts + part) * 16 + digit, total)


@launched
@triton.jit(do_not_specialize=["turn", "num_parts", "repeat"])
def _least_kernel(
    given, leasts, counts, known, turn, num_parts, repeat, PARTS: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Convert the final bits to the lowest score that is kept."""
    await_turn(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    wanted = _num_wanted(given, row, repeat)
    if wanted > 0:
        bits = _settled(counts, known, row, turn, wanted, num_parts, PARTS)
        tl.store(leasts + row, -(0x7FFFFFFF - bits).to(tl.float32, bitcast=True))


def keep_top_k(
    given: Scores, peaks: Tensor, leasts: Tensor, repeat: int, depth: int, blocks: dict[str, Any]
) -> None:
    """Set `leasts` [R] to the lowest score that top-k keeps, in rows that have a top-k.

    peaks [R, parts] are the best scores of parts of `blocks["BLOCK"]` tokens.
    """
    (R, V), device = given.logits.shape, given.logits.device
    # With many rows a program does more blocks, because its setup costs as much as a block.
    num_blocks = 1 if R < 8 else 4
    num_parts, num_peaks = triton.cdiv(V, num_blocks * blocks["BLOCK"]), peaks.shape[1]
    counts = torch.empty(2, R, num_parts, 16, dtype=torch.int32, device=device)
    known = torch.empty(2, R, dtype=torch.int32, device=device)
    parts = {"PARTS": triton.next_power_of_2(num_parts)}
    for turn in range(_TURNS):
        _narrow_kernel[(num_parts, R)](
            given, peaks, counts, known, turn, num_parts, num_peaks, repeat, depth,
            BLOCKS=num_blocks, PEAKS=triton.next_power_of_2(num_peaks), **blocks, **parts,
        )  # fmt: skip
    _least_kernel[(1, R)](given, leasts, counts, known, _TURNS, num_parts, repeat, **parts, **overlap(device))
