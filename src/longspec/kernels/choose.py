"""Choosing tokens on the device, as `longspec.decoding.choose` does: without a sort, nothing read back.

A row's filters come to one number, the least score that is kept: bisection over the bits of a float finds
it. Then the vocabulary is cut into parts, whose best tokens (score plus noise) are compared.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.noise import gumbel

_BLOCK = 1024
_ROW_BLOCK = 16384


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


@triton.jit(do_not_specialize=["top_k"])
def _least_kernel(
    logits, seen, peaks, leasts, logits_r, seen_r, size,
    temperature, penalty, top_k, top_p, log_min_p,
    BLOCK: tl.constexpr, PENALTY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """A row's best score, and of the scores less that, by the temperature, the least that is kept."""
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits += row * logits_r
    seen += row * seen_r
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in tl.range(0, size, BLOCK):
        best = tl.maximum(best, _penalised(logits, seen, first + block, size, penalty, PENALTY))
    peak = tl.max(best, 0)
    least = log_min_p
    if TOP_K:
        # The k-th best is the largest distance that fewer than k lie below.
        distance = tl.zeros([], tl.int32)
        for turn in tl.range(0, 31):
            candidate = distance | (1 << (30 - turn))
            nearer = tl.zeros([BLOCK], tl.int32)
            for first in tl.range(0, size, BLOCK):
                score = _scaled(logits, seen, first + block, size, penalty, peak, temperature, PENALTY)
                bits = tl.abs(score).to(tl.int32, bitcast=True)
                nearer += tl.where((bits < candidate) & (first + block < size), 1, 0)
            distance = tl.where(tl.sum(nearer, 0) < top_k, candidate, distance)
        kth = -distance.to(tl.float32, bitcast=True)
        least = tl.maximum(least, kth)
    if TOP_P:
        # min-p comes after top-p: only top-k narrows what the probabilities are of.
        floor = kth if TOP_K else -float("inf")
        mass = tl.zeros([BLOCK], tl.float32)
        for first in tl.range(0, size, BLOCK):
            score = _scaled(logits, seen, first + block, size, penalty, peak, temperature, PENALTY)
            mass += tl.where(score >= floor, tl.exp(score), 0.0)
        wanted = tl.sum(mass, 0) * top_p
        # Two bits a turn: no weight exceeds 1, so none has a bit above the thirtieth.
        enough = tl.zeros([], tl.int32)
        for turn in tl.range(0, 15):
            step = 1 << (28 - 2 * turn)
            one, two, three = mass * 0, mass * 0, mass * 0
            for first in tl.range(0, size, BLOCK):
                score = _scaled(logits, seen, first + block, size, penalty, peak, temperature, PENALTY)
                weight = tl.where(score >= floor, tl.exp(score), 0.0)
                bits = weight.to(tl.int32, bitcast=True)
                one += tl.where(bits >= enough + step, weight, 0.0)
                two += tl.where(bits >= enough + 2 * step, weight, 0.0)
                three += tl.where(bits >= enough + 3 * step, weight, 0.0)
            enough += step * (
                (tl.sum(one, 0) >= wanted).to(tl.int32)
                + (tl.sum(two, 0) >= wanted).to(tl.int32)
                + (tl.sum(three, 0) >= wanted).to(tl.int32)
            )
        kept = tl.zeros([BLOCK], tl.float32)
        for first in tl.range(0, size, BLOCK):
            score = _scaled(logits, seen, first + block, size, penalty, peak, temperature, PENALTY)
            weight = tl.where(score >= floor, tl.exp(score), 0.0)
            kept = tl.minimum(kept, tl.where(weight.to(tl.int32, bitcast=True) >= enough, score, 0.0))
        least = tl.maximum(least, tl.min(kept, 0))
    tl.store(peaks + row, peak)
    tl.store(leasts + row, least)


@triton.jit
def _pick_kernel(
    logits, seen, seeds, positions, peaks, leasts, best, token, logits_r, seen_r, size,
    temperature, penalty,
    BLOCK: tl.constexpr, PENALTY: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = part * BLOCK + tl.arange(0, BLOCK)
    logits += row * logits_r
    seen += row * seen_r
    if GREEDY:
        value = _penalised(logits, seen, i, size, penalty, PENALTY).to(tl.float64)
    else:
        score = _scaled(logits, seen, i, size, penalty, tl.load(peaks + row), temperature, PENALTY)
        noise = gumbel(tl.load(seeds + row + i * 0), tl.load(positions + row + i * 0), i)
        kept = (score >= tl.load(leasts + row)) & (i < size)
        value = tl.where(kept, score.to(tl.float64) + noise, -float("inf"))
    most = tl.max(value, 0)
    place = row * tl.num_programs(0) + part
    tl.store(best + place, most)
    tl.store(token + place, tl.min(tl.where((value == most) & (i < size), i, size - 1), 0))


@triton.jit(do_not_specialize=["num_parts"])
def _best_kernel(best, token, out, num_parts, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = part < num_parts
    value = tl.load(best + row * num_parts + part, mask=inside, other=-float("inf"))
    tokens = tl.load(token + row * num_parts + part, mask=inside, other=2147483647)
    winners = tl.where(value == tl.max(value, 0), tokens, 2147483647)
    tl.store(out + row, tl.min(winners, 0).to(tl.int64))


def choose_tokens(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seen: Tensor | None = None,
) -> Tensor:
    """The token of each row, int64 [R]: what `longspec.decoding.choose.choose` gives, settings as there.

    logits are fp32 [R, V], seeds and positions int64 [R], seen bool [R, V]; a row of logits or of `seen`
    must lie in one piece.
    """
    R, V = logits.shape
    assert logits.dtype == torch.float32, "scores are fp32, or near ones would tie"
    assert logits.stride(1) == 1
    penalty = repetition_penalty != 1
    assert not penalty or seen is not None, "the repetition penalty needs the tokens seen so far"
    marks = seen.view(torch.uint8) if penalty and seen is not None else logits
    strides = (logits.stride(0), marks.stride(0))
    peaks, leasts = logits.new_empty(2, R).unbind(0)
    greedy = temperature == 0
    temperature = max(temperature, torch.finfo(torch.float32).tiny)
    if not greedy:
        _least_kernel[(R,)](
            logits, marks, peaks, leasts, *strides, V, temperature, repetition_penalty, int(top_k), top_p,
            math.log(min_p) if min_p else -math.inf,
            BLOCK=min(_ROW_BLOCK, triton.next_power_of_2(V)), PENALTY=penalty,
            TOP_K=0 < top_k < V, TOP_P=top_p < 1, num_warps=16,
        )  # fmt: skip
    num_parts = triton.cdiv(V, _BLOCK)
    best = torch.empty(R, num_parts, dtype=torch.float64, device=logits.device)
    token = torch.empty(R, num_parts, dtype=torch.int32, device=logits.device)
    _pick_kernel[(num_parts, R)](
        logits, marks, seeds, positions, peaks, leasts, best, token, *strides, V, temperature,
        repetition_penalty, BLOCK=_BLOCK, PENALTY=penalty, GREEDY=greedy,
    )  # fmt: skip
    out = torch.empty(R, dtype=torch.int64, device=logits.device)
    _best_kernel[(R,)](best, token, out, num_parts, BLOCK=triton.next_power_of_2(num_parts))
    return out
