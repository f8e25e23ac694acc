"""Choosing tokens on the device, as `longspec.decoding.choose` does: without a sort, nothing read back.

The vocabulary is cut into parts, a program each, that do one of these at a time: find the best score; sum
what lies above each of sixteen thresholds, which settles four bits of the least score that a filter keeps
(floats are ordered as their bits are, so eight such turns find it exactly); add the noise and pick.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, overlap
from longspec.kernels.noise import gumbel

_BLOCK = 1024
_TURNS = 8


@triton.jit
def _penalised(logits, seen, i, size, penalty, PENALTY: tl.constexpr):
    """Scores of tokens `i`, those that occurred made less probable; -inf outside and for nan."""
    score = tl.load(logits + i, mask=i < size, other=-float("inf"))
    if PENALTY:
        had = tl.load(seen + i, mask=i < size, other=0) != 0
        less = tl.where(score > 0, tl.div_rn(score, penalty), score * penalty)
        score = tl.where(had, less, score)
    return tl.where(score == score, score, -float("inf"))


@triton.jit
def _scaled(logits, seen, i, size, penalty, peak, temperature, PENALTY: tl.constexpr):
    """How far scores lie below the row's best, `peak`, by the temperature: 0 or less."""
    score = _penalised(logits, seen, i, size, penalty, PENALTY)
    return tl.div_rn(score - peak, temperature)


@triton.jit
def _row_peak(peaks, row, num_parts, PARTS: tl.constexpr):
    """A row's best score, from those of its parts."""
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(peaks + row * num_parts + part, mask=part < num_parts, other=-float("inf")), 0)


@triton.jit
def _peak_kernel(
    logits, seen, peaks, logits_r, seen_r, size, penalty, BLOCK: tl.constexpr, PENALTY: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = part * BLOCK + tl.arange(0, BLOCK)
    score = _penalised(logits + row * logits_r, seen + row * seen_r, i, size, penalty, PENALTY)
    tl.store(peaks + row * tl.num_programs(0) + part, tl.max(score, 0))


@triton.jit
def _settled(sums, known, goals, row, turn, wanted, num_parts, PARTS: tl.constexpr, MASS: tl.constexpr):
    """The bits known after `turn` turns, and what must lie above the threshold."""
    digit, part = tl.arange(0, 16), tl.arange(0, PARTS)
    place = ((turn % 2 * tl.num_programs(1) + row) * num_parts + part)[:, None] * 16 + digit[None, :]
    totals = tl.sum(tl.load(sums + place, mask=(part < num_parts)[:, None], other=0.0), 0)
    if MASS:
        if turn == 1:  # the first threshold was 0, above which lies everything
            wanted *= tl.sum(tl.where(digit == 0, totals, 0.0), 0)
        else:
            wanted = tl.load(goals + row)
    enough = tl.sum(((totals >= wanted) & (digit > 0)).to(tl.int32), 0)
    return tl.load(known + turn % 2 * tl.num_programs(1) + row) | (enough << (32 - 4 * turn)), wanted


@triton.jit(do_not_specialize=["turn", "num_parts", "num_peaks"])
def _narrow_kernel(
    logits, seen, peaks, leasts, sums, known, goals, logits_r, seen_r, size,
    temperature, penalty, wanted, turn, num_parts, num_peaks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, PEAKS: tl.constexpr,
    PENALTY: tl.constexpr, MASS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sum a part's tokens, or their probability (MASS), above the sixteen next thresholds."""
    await_turn(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    bits = tl.zeros([], tl.int32)
    if turn > 0:
        bits, goal = _settled(sums, known, goals, row, turn, wanted, num_parts, PARTS, MASS)
        if part == 0:
            tl.store(goals + row, goal)
    # What this turn writes, the next one reads: two sets in turn, so that nobody reads what is being written.
    ours = (turn + 1) % 2 * tl.num_programs(1) + row
    if part == 0:
        tl.store(known + ours, bits)
    peak, least = _row_peak(peaks, row, num_peaks, PEAKS), tl.load(leasts + row)
    logits += row * logits_r
    seen += row * seen_r
    digit = tl.arange(0, 16)
    lowest = bits.to(tl.uint32)
    highest = lowest | (tl.full([], 0xFFFFFFFF, tl.uint32) >> (4 * turn).to(tl.uint32))
    threshold = lowest + (digit.to(tl.uint32) << (28 - 4 * turn))
    total = tl.zeros([16], tl.float32)
    # A part whose best lies below all thresholds is not read again: soon that is nearly every part.
    blocks = part * BLOCKS + tl.arange(0, BLOCKS)
    own = tl.load(peaks + row * num_peaks + blocks, mask=blocks < num_peaks, other=-float("inf"))
    best = tl.div_rn(tl.max(own, 0) - peak, temperature)
    reaches = (0x7FFFFFFF - tl.abs(best).to(tl.int32, bitcast=True)).to(tl.uint32) >= lowest
    for block in tl.range(0, tl.where(reaches, BLOCKS, 0)):
        i = (part * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        score = _scaled(logits, seen, i, size, penalty, peak, temperature, PENALTY)
        counts = score >= least if MASS else i < size
        weight = tl.where(counts, tl.exp(score) if MASS else 1.0, 0.0)
        height = (0x7FFFFFFF - tl.abs(score).to(tl.int32, bitcast=True)).to(tl.uint32)
        # What lies above all thresholds counts for each; between them there is mostly nothing any more.
        total += tl.sum(tl.where(height > highest, weight, 0.0), 0)
        between = tl.where((height >= lowest) & (height <= highest), weight, 0.0)
        if tl.max(between, 0) > 0:
            total += tl.sum(tl.where(height[None, :] >= threshold[:, None], between[None, :], 0.0), 1)
    tl.store(sums + (ours * num_parts + part) * 16 + digit, total)


@triton.jit(do_not_specialize=["turn", "num_parts"])
def _least_kernel(
    leasts, sums, known, goals, wanted, turn, num_parts, PARTS: tl.constexpr, MASS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Turn the bits that are known at last into the least score that is kept."""
    await_turn(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    bits, _ = _settled(sums, known, goals, row, turn, wanted, num_parts, PARTS, MASS)
    least = -(0x7FFFFFFF - bits).to(tl.float32, bitcast=True)
    tl.store(leasts + row, tl.maximum(tl.load(leasts + row), least))


@triton.jit(do_not_specialize=["repeat", "ahead"])
def _pick_kernel(
    logits, seen, seeds, positions, peaks, leasts, best, token, logits_r, seen_r, size,
    temperature, penalty, log_min_p, repeat, ahead,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PENALTY: tl.constexpr, GREEDY: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = part * BLOCK + tl.arange(0, BLOCK)
    logits += row * logits_r
    seen += row * seen_r
    if GREEDY:
        value = _penalised(logits, seen, i, size, penalty, PENALTY).to(tl.float64)
    else:
        peak = _row_peak(peaks, row, tl.num_programs(0), PARTS)
        score = _scaled(logits, seen, i, size, penalty, peak, temperature, PENALTY)
        kept = (score >= tl.load(leasts + row)) & (score >= log_min_p) & (i < size)
        value = tl.full([BLOCK], -float("inf"), tl.float64)
        # The filters leave most parts with nothing, and noise is the most costly thing here.
        if tl.max(kept.to(tl.int32), 0) > 0:
            seed, position = tl.load(seeds + row // repeat + i * 0), tl.load(positions + row + i * 0)
            noise = gumbel(seed, position + ahead, i)
            value = tl.where(kept, score.to(tl.float64) + noise, -float("inf"))
    most = tl.max(value, 0)
    place = row * tl.num_programs(0) + part
    tl.store(best + place, most)
    tl.store(token + place, tl.min(tl.where((value == most) & (i < size), i, size - 1), 0))


@triton.jit(do_not_specialize=["num_parts"])
def _best_kernel(best, token, out, num_parts, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_turn(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = part < num_parts
    value = tl.load(best + row * num_parts + part, mask=inside, other=-float("inf"))
    tokens = tl.load(token + row * num_parts + part, mask=inside, other=2147483647)
    winners = tl.where(value == tl.max(value, 0), tokens, 2147483647)
    tl.store(out + row, tl.min(winners, 0).to(tl.int64))


def _narrow(
    logits: Tensor,
    marks: Tensor,
    peaks: Tensor,
    leasts: Tensor,
    settings: tuple[float, float, float],
    mass: bool,
) -> None:
    """Raise `leasts` to the least score that is kept by top-k or, with `mass`, by top-p.

    The settings are temperature, repetition penalty and the filter's limit.
    """
    R, V = logits.shape
    # Of many rows each program takes more: what it must know first costs as much as a block does.
    num_blocks = 1 if R < 8 else 4
    num_parts, num_peaks = triton.cdiv(V, num_blocks * _BLOCK), peaks.shape[1]
    sums, goals = logits.new_empty(2, R, num_parts, 16), torch.empty_like(leasts)
    known = torch.empty(2, R, dtype=torch.int32, device=logits.device)
    parts = {"PARTS": triton.next_power_of_2(num_parts), "MASS": mass}
    for turn in range(_TURNS):
        _narrow_kernel[(num_parts, R)](
            logits, marks, peaks, leasts, sums, known, goals, logits.stride(0), marks.stride(0), V,
            *settings, turn, num_parts, num_peaks, BLOCK=_BLOCK, BLOCKS=num_blocks,
            PEAKS=triton.next_power_of_2(num_peaks), PENALTY=settings[1] != 1, **parts,
            **overlap(logits.device),
        )  # fmt: skip
    _least_kernel[(1, R)](
        leasts, sums, known, goals, settings[2], _TURNS, num_parts, **parts, **overlap(logits.device)
    )  # fmt: skip


def choose_tokens(
    logits: Tensor,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seen: Tensor | None = None,
    ahead: int = 0,
) -> Tensor:
    """The token of each row, int64 [R]: what `longspec.decoding.choose.choose` gives, settings as there.

    logits are fp32 [R, V], seeds and positions int64 [R], which greedy choice does without, seen bool
    [R, V]; a row of logits or of `seen` must lie in one piece. Of seeds there may be fewer, each for as many
    rows in turn. The chosen tokens stand `ahead` of the positions.
    """
    R, V = logits.shape
    assert logits.dtype == torch.float32, "scores are fp32, or near ones would tie"
    assert logits.stride(1) == 1
    penalty = repetition_penalty != 1
    assert not penalty or seen is not None, "the repetition penalty needs the tokens seen so far"
    marks = seen.view(torch.uint8) if penalty and seen is not None else logits
    rows = (logits.stride(0), marks.stride(0), V)
    num_parts = triton.cdiv(V, _BLOCK)
    grid, blocks = (num_parts, R), {"BLOCK": _BLOCK, "PENALTY": penalty}
    parts = {"PARTS": triton.next_power_of_2(num_parts)}
    greedy = temperature == 0
    repeat = 1 if seeds is None else R // seeds.shape[0]
    temperature = max(temperature, torch.finfo(torch.float32).tiny)
    peaks = leasts = logits
    if greedy:
        seeds = positions = logits
    else:
        assert seeds is not None, "chance needs seeds"
        assert positions is not None, "chance needs positions"
        # One seed for all may have been expanded rather than copied.
        seeds, positions = seeds.contiguous(), positions.contiguous()
        peaks, leasts = logits.new_empty(R, num_parts), logits.new_full((R,), -math.inf)
        _peak_kernel[grid](
            logits, marks, peaks, *rows, repetition_penalty, **blocks, **overlap(logits.device)
        )  # fmt: skip
    for limit, mass in ((float(top_k), False), (top_p, True)):
        if not greedy and 0 < limit < (1 if mass else V):
            settings = (temperature, repetition_penalty, limit)
            _narrow(logits, marks, peaks, leasts, settings, mass)
    best = torch.empty(R, num_parts, dtype=torch.float64, device=logits.device)
    token = torch.empty(R, num_parts, dtype=torch.int32, device=logits.device)
    _pick_kernel[grid](
        logits, marks, seeds, positions, peaks, leasts, best, token, *rows, temperature,
        repetition_penalty, math.log(min_p) if min_p else -math.inf, repeat, ahead, **blocks, **parts,
        GREEDY=greedy, **overlap(logits.device),
    )  # fmt: skip
    out = torch.empty(R, dtype=torch.int64, device=logits.device)
    _best_kernel[(R,)](best, token, out, num_parts, BLOCK=parts["PARTS"], **overlap(logits.device))
    return out
