"""Choosing tokens on the device, as `longspec.decoding.choose` does: without a sort, nothing read back.

The vocabulary is cut into parts, a program each, that do one of these at a time: find the best score; add the
noise and pick; sum what lies above the token that was picked.

The last is all that top-p needs. A token drawn from the whole vocabulary is what a draw among the kept would
give if it is one of them, and it is if what lies above it does not reach p. If it is not, neither is anything
below it, and the draw is repeated among what is better; at p = 0.9 that happens to one token in ten at most.
Top-k, which keeps little, looks for the least score that it keeps: tokens above each of sixteen thresholds
settle four bits of it (floats are ordered as their bits are), so eight turns find it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap
from longspec.kernels.noise import gumbel

_BLOCK = 1024
_TURNS = 8
_DRAWS = 4


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


@launched
@triton.jit
def _peak_kernel(
    logits, seen, peaks, leasts, edges, settled, logits_r, seen_r, size, penalty, edge,
    BLOCK: tl.constexpr, PENALTY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best score of each part; and where the search for a row's token begins."""
    await_turn(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if part == 0:
        tl.store(leasts + row, -float("inf"))
        tl.store(edges + row, edge)
        tl.store(settled + row, 0)
    i = part * BLOCK + tl.arange(0, BLOCK)
    score = _penalised(logits + row * logits_r, seen + row * seen_r, i, size, penalty, PENALTY)
    tl.store(peaks + row * tl.num_programs(0) + part, tl.max(score, 0))


@triton.jit
def _settled(counts, known, row, turn, wanted, num_parts, PARTS: tl.constexpr):
    """The bits known after `turn` turns, where `wanted` tokens must lie above the threshold."""
    digit, part = tl.arange(0, 16), tl.arange(0, PARTS)
    place = ((turn % 2 * tl.num_programs(1) + row) * num_parts + part)[:, None] * 16 + digit[None, :]
    totals = tl.sum(tl.load(counts + place, mask=(part < num_parts)[:, None], other=0), 0)
    enough = tl.sum(((totals >= wanted) & (digit > 0)).to(tl.int32), 0)
    return tl.load(known + turn % 2 * tl.num_programs(1) + row) | (enough << (32 - 4 * turn))


@launched
@triton.jit(do_not_specialize=["turn", "num_parts", "num_peaks", "wanted"])
def _narrow_kernel(
    logits, seen, peaks, counts, known, logits_r, seen_r, size,
    temperature, penalty, wanted, turn, num_parts, num_peaks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, PEAKS: tl.constexpr,
    PENALTY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Count a part's tokens above the sixteen next thresholds."""
    await_turn(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    bits = tl.zeros([], tl.int32)
    if turn > 0:
        bits = _settled(counts, known, row, turn, wanted, num_parts, PARTS)
    # What this turn writes, the next one reads: two sets in turn, so that nobody reads what is being written.
    ours = (turn + 1) % 2 * tl.num_programs(1) + row
    if part == 0:
        tl.store(known + ours, bits)
    peak = _row_peak(peaks, row, num_peaks, PEAKS)
    logits += row * logits_r
    seen += row * seen_r
    digit = tl.arange(0, 16)
    lowest = bits.to(tl.uint32)
    highest = lowest | (tl.full([], 0xFFFFFFFF, tl.uint32) >> (4 * turn).to(tl.uint32))
    threshold = lowest + (digit.to(tl.uint32) << (28 - 4 * turn))
    total = tl.zeros([16], tl.int32)
    # A part whose best lies below all thresholds is not read again: soon that is nearly every part.
    blocks = part * BLOCKS + tl.arange(0, BLOCKS)
    own = tl.load(peaks + row * num_peaks + blocks, mask=blocks < num_peaks, other=-float("inf"))
    best = tl.div_rn(tl.max(own, 0) - peak, temperature)
    reaches = (0x7FFFFFFF - tl.abs(best).to(tl.int32, bitcast=True)).to(tl.uint32) >= lowest
    for block in tl.range(0, tl.where(reaches, BLOCKS, 0)):
        i = (part * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        score = _scaled(logits, seen, i, size, penalty, peak, temperature, PENALTY)
        height = (0x7FFFFFFF - tl.abs(score).to(tl.int32, bitcast=True)).to(tl.uint32)
        # What lies above all thresholds counts for each; between them there is mostly nothing any more.
        total += tl.sum(((height > highest) & (i < size)).to(tl.int32), 0)
        between = (height >= lowest) & (height <= highest) & (i < size)
        if tl.max(between.to(tl.int32), 0) > 0:
            above = (height[None, :] >= threshold[:, None]) & between[None, :]
            total += tl.sum(above.to(tl.int32), 1)
    tl.store(counts + (ours * num_parts + part) * 16 + digit, total)


@launched
@triton.jit(do_not_specialize=["turn", "num_parts", "wanted"])
def _least_kernel(
    leasts, counts, known, wanted, turn, num_parts, PARTS: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Turn the bits that are known at last into the least score that is kept."""
    await_turn(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    bits = _settled(counts, known, row, turn, wanted, num_parts, PARTS)
    tl.store(leasts + row, -(0x7FFFFFFF - bits).to(tl.float32, bitcast=True))


@triton.jit
def _drawn(score, edge, least, log_min_p, seed, position, i, size, BLOCK: tl.constexpr):
    """Score and noise of tokens `i` above the edge, as far as the filters keep them; -inf for others."""
    kept = (score > edge) & (score >= least) & (score >= log_min_p) & (i < size)
    value = tl.full([BLOCK], -float("inf"), tl.float64)
    # The filters leave most parts with nothing, and noise is the most costly thing here.
    if tl.max(kept.to(tl.int32), 0) > 0:
        value = tl.where(kept, score.to(tl.float64) + gumbel(seed + i * 0, position + i * 0, i), value)
    return value


@triton.jit
def _mass(score, edge, least):
    """The probability above the edge and in all, of scores that top-k has kept; up to the row's factor."""
    weight = tl.where(score >= least, tl.exp(score), 0.0)
    return tl.sum(tl.where(score > edge, weight, 0.0), 0), tl.sum(weight, 0)


@triton.jit
def _holds(masses, row, num_parts, top_p, PARTS: tl.constexpr):
    """Whether top-p keeps a row's candidate: what lies above it is not enough."""
    part = tl.arange(0, PARTS)
    at, real = masses + (row * num_parts + part) * 2, part < num_parts
    above, whole = tl.load(at, mask=real, other=0.0), tl.load(at + 1, mask=real, other=0.0)
    return tl.sum(above, 0) < top_p * tl.sum(whole, 0)


@triton.jit
def _winner(best, token, row, num_parts, PARTS: tl.constexpr):
    """The best value of a row's parts, and the first token that has it."""
    part = tl.arange(0, PARTS)
    inside = part < num_parts
    value = tl.load(best + row * num_parts + part, mask=inside, other=-float("inf"))
    tokens = tl.load(token + row * num_parts + part, mask=inside, other=2147483647)
    most = tl.max(value, 0)
    return most, tl.min(tl.where(value == most, tokens, 2147483647), 0)


@launched
@triton.jit(do_not_specialize=["repeat", "ahead"])
def _pick_kernel(
    logits, seen, seeds, positions, peaks, leasts, edges, masses, settled, settling, best, token,
    logits_r, seen_r, size, temperature, penalty, top_p, log_min_p, repeat, ahead,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PENALTY: tl.constexpr, GREEDY: tl.constexpr,
    AGAIN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best token of a part. AGAIN: for rows alone whose candidate does not hold, among what is better;
    which rows were settled before is read, and which are now is written."""
    await_turn(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    needed = True
    if AGAIN:
        needed = tl.load(settled + row) == 0
        if needed:
            needed = not _holds(masses, row, tl.num_programs(0), top_p, PARTS)
        if part == 0:
            tl.store(settling + row, tl.where(needed, 0, 1))
    if needed:
        i = part * BLOCK + tl.arange(0, BLOCK)
        logits += row * logits_r
        seen += row * seen_r
        if GREEDY:
            value = _penalised(logits, seen, i, size, penalty, PENALTY).to(tl.float64)
        else:
            peak = _row_peak(peaks, row, tl.num_programs(0), PARTS)
            score = _scaled(logits, seen, i, size, penalty, peak, temperature, PENALTY)
            seed, position = tl.load(seeds + row // repeat), tl.load(positions + row) + ahead
            edge, least = tl.load(edges + row), tl.load(leasts + row)
            value = _drawn(score, edge, least, log_min_p, seed, position, i, size, BLOCK)
        most = tl.max(value, 0)
        place = row * tl.num_programs(0) + part
        tl.store(best + place, most)
        tl.store(token + place, tl.min(tl.where((value == most) & (i < size), i, size - 1), 0))


@launched
@triton.jit
def _check_kernel(
    logits, seen, peaks, leasts, edges, masses, settled, best, token, out, logits_r, seen_r, size,
    temperature, penalty,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PENALTY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A part's share of what top-p must know about the row's candidate."""
    await_turn(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(settled + row) == 0:
        logits += row * logits_r
        seen += row * seen_r
        peak = _row_peak(peaks, row, tl.num_programs(0), PARTS)
        most, winner = _winner(best, token, row, tl.num_programs(0), PARTS)
        edge = _scaled(logits, seen, winner, size, penalty, peak, temperature, PENALTY)
        if part == 0:
            tl.store(edges + row, edge)
            tl.store(out + row, winner.to(tl.int64))
        i = part * BLOCK + tl.arange(0, BLOCK)
        score = _scaled(logits, seen, i, size, penalty, peak, temperature, PENALTY)
        above, whole = _mass(score, edge, tl.load(leasts + row))
        # Of scores that are none, nothing is better than any of them.
        above = tl.where(most == -float("inf"), -1.0, above)
        place = (row * tl.num_programs(0) + part) * 2
        tl.store(masses + place, above)
        tl.store(masses + place + 1, whole)


@launched
@triton.jit(do_not_specialize=["num_parts", "repeat", "ahead"])
def _finish_kernel(
    logits, seen, seeds, positions, peaks, leasts, edges, masses, settled, out,
    logits_r, seen_r, size, temperature, penalty, top_p, log_min_p, num_parts, repeat, ahead,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PENALTY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Go on, a program for a row, until a candidate holds."""
    await_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    holds = tl.load(settled + row) != 0
    if not holds:
        holds = _holds(masses, row, num_parts, top_p, PARTS)
    logits += row * logits_r
    seen += row * seen_r
    peak, edge, least = _row_peak(peaks, row, num_parts, PARTS), tl.load(edges + row), tl.load(leasts + row)
    seed, position = tl.load(seeds + row // repeat), tl.load(positions + row) + ahead
    while not holds:
        most, winner = tl.full([], -float("inf"), tl.float64), tl.zeros([], tl.int32) + size - 1
        for part in tl.range(0, num_parts):
            i = part * BLOCK + tl.arange(0, BLOCK)
            score = _scaled(logits, seen, i, size, penalty, peak, temperature, PENALTY)
            value = _drawn(score, edge, least, log_min_p, seed, position, i, size, BLOCK)
            here = tl.max(value, 0)
            first = tl.min(tl.where((value == here) & (i < size), i, size - 1), 0)
            winner = tl.where(here > most, first, winner)
            most = tl.maximum(most, here)
        edge = _scaled(logits, seen, winner, size, penalty, peak, temperature, PENALTY)
        above, whole = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
        for part in tl.range(0, num_parts):
            i = part * BLOCK + tl.arange(0, BLOCK)
            score = _scaled(logits, seen, i, size, penalty, peak, temperature, PENALTY)
            more, all_of_it = _mass(score, edge, least)
            above += more
            whole += all_of_it
        holds = (above < top_p * whole) | (most == -float("inf"))
        tl.store(out + row, winner.to(tl.int64))


@launched
@triton.jit(do_not_specialize=["num_parts"])
def _best_kernel(best, token, out, num_parts, PARTS: tl.constexpr, OVERLAP: tl.constexpr):
    await_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, _winner(best, token, row, num_parts, PARTS)[1].to(tl.int64))


def _keep_top_k(
    logits: Tensor, marks: Tensor, peaks: Tensor, leasts: Tensor, temperature: float, penalty: float, k: int
) -> None:
    """Raise `leasts` to the least score that top-k keeps."""
    R, V = logits.shape
    # Of many rows each program takes more: what it must know first costs as much as a block does.
    num_blocks = 1 if R < 8 else 4
    num_parts, num_peaks = triton.cdiv(V, num_blocks * _BLOCK), peaks.shape[1]
    counts = torch.empty(2, R, num_parts, 16, dtype=torch.int32, device=logits.device)
    known = torch.empty(2, R, dtype=torch.int32, device=logits.device)
    parts = {"PARTS": triton.next_power_of_2(num_parts), **overlap(logits.device)}
    for turn in range(_TURNS):
        _narrow_kernel[(num_parts, R)](
            logits, marks, peaks, counts, known, logits.stride(0), marks.stride(0), V,
            temperature, penalty, k, turn, num_parts, num_peaks, BLOCK=_BLOCK, BLOCKS=num_blocks,
            PEAKS=triton.next_power_of_2(num_peaks), PENALTY=penalty != 1, **parts,
        )  # fmt: skip
    _least_kernel[(1, R)](leasts, counts, known, k, _TURNS, num_parts, **parts)


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
    penalty, device = repetition_penalty, logits.device
    assert penalty == 1 or seen is not None, "the repetition penalty needs the tokens seen so far"
    marks = seen.view(torch.uint8) if penalty != 1 and seen is not None else logits
    rows = (logits.stride(0), marks.stride(0), V)
    num_parts = triton.cdiv(V, _BLOCK)
    grid, blocks = (num_parts, R), {"BLOCK": _BLOCK, "PENALTY": penalty != 1, **overlap(device)}
    parts = {"PARTS": triton.next_power_of_2(num_parts)}
    best = torch.empty(R, num_parts, dtype=torch.float64, device=device)
    token = torch.empty(R, num_parts, dtype=torch.int32, device=device)
    out = torch.empty(R, dtype=torch.int64, device=device)
    if temperature == 0:
        _pick_kernel[grid](
            *(logits, marks, *[logits] * 8, best, token, *rows, 1.0, penalty, 1.0, 0.0, 1, ahead),
            GREEDY=True, AGAIN=False, **blocks, **parts,
        )  # fmt: skip
        _best_kernel[(R,)](best, token, out, num_parts, **parts, **overlap(device))
        return out
    assert seeds is not None, "chance needs seeds"
    assert positions is not None, "chance needs positions"
    temperature = max(temperature, torch.finfo(torch.float32).tiny)
    peaks, masses = logits.new_empty(R, num_parts), logits.new_empty(R, num_parts, 2)
    leasts, edges = logits.new_empty(2, R).unbind(0)
    # One for each turn: what a turn writes must not be what others read in it.
    settled = torch.empty(_DRAWS, R, dtype=torch.int32, device=device)
    # All tokens below this together have less than what top-p leaves out; a little less, for rounding.
    edge = math.log((1 - top_p) / V) - 0.01 if top_p < 1 else -math.inf
    _peak_kernel[grid](logits, marks, peaks, leasts, edges, settled[0], *rows, penalty, edge, **blocks)
    if 0 < top_k < V:
        _keep_top_k(logits, marks, peaks, leasts, temperature, penalty, int(top_k))
    # One seed for all may have been expanded rather than copied.
    chance = (seeds.contiguous(), positions.contiguous(), peaks, leasts, edges, masses)
    limits = (top_p, math.log(min_p) if min_p else -math.inf)
    repeat = R // seeds.shape[0]
    for turn in range(_DRAWS if top_p < 1 else 1):
        _pick_kernel[grid](
            logits, marks, *chance, settled[turn - 1], settled[turn], best, token, *rows, temperature,
            penalty, *limits, repeat, ahead, GREEDY=False, AGAIN=turn > 0, **blocks, **parts,
        )  # fmt: skip
        if top_p < 1:
            _check_kernel[grid](
                logits, marks, *chance[2:], settled[turn], best, token, out, *rows, temperature, penalty,
                **blocks, **parts,
            )  # fmt: skip
    if top_p == 1:
        _best_kernel[(R,)](best, token, out, num_parts, **parts, **overlap(device))
    else:
        _finish_kernel[(R,)](
            logits, marks, *chance, settled[-1], out, *rows, temperature, penalty, *limits, num_parts,
            repeat, ahead, **blocks, **parts,
        )  # fmt: skip
    return out
