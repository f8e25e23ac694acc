"""Choose tokens on the device, as `longspec.decoding.choose` does, without a sort and without the host.

Each row has its own settings, which are data on the device. So the same launches serve greedy rows and
sampled rows with any settings; a row that does not need a launch leaves it at once.

The vocabulary is cut into parts with one program each. A launch does one of three things: find the best
score; add the noise and pick a token; sum the probability above the picked token.

The third is all that top-p needs. Draw a token from the whole vocabulary. If the probability above it is less
than p, top-p keeps it, and it is the same token that a draw among the kept tokens would give. Otherwise top-p
drops it and everything below it, and the draw is repeated among the better tokens. At p = 0.9 this happens
for at most one token in ten. Top-k keeps few tokens; `longspec.kernels.narrow` finds the lowest kept score.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap
from longspec.kernels.narrow import keep_top_k
from longspec.kernels.noise import gumbel
from longspec.kernels.scores import Scores, is_sampled, penalised, row_peak, scaled

_BLOCK = 1024
_DRAWS = 4


class RowSampling(Protocol):
    """The sampling settings of B sequence rows: tensors [B] on the device."""

    @property
    def temperature(self) -> Tensor:
        """fp32; 0 is greedy, whatever the other settings are."""

    @property
    def top_k(self) -> Tensor:
        """int64; off if 0 or at least the size of the vocabulary."""

    @property
    def top_p(self) -> Tensor:
        """fp32; 1 is off."""

    @property
    def min_p(self) -> Tensor:
        """fp32; 0 is off."""

    @property
    def penalty(self) -> Tensor:
        """The repetition penalty, fp32; 1 is off."""

    @property
    def seen(self) -> Tensor | None:
        """Which tokens occurred before, bool [B, V]; None if no row has a penalty."""


@launched
@triton.jit(do_not_specialize=["repeat", "depth"])
def _peak_kernel(
    given, peaks, leasts, edges, settled, repeat, depth,
    BLOCK: tl.constexpr, PENALTY: tl.constexpr, PATH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best score of each part of a sampled row; also sets the start values of the row's search."""
    await_turn(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if part == 0:
        # All tokens below this score together have less than 1 - top_p. The 0.01 allows for rounding.
        left_out = 1 - tl.load(given.top_p + row // repeat)
        edge = tl.log(tl.maximum(left_out, 1e-30) / given.size) - 0.01
        tl.store(leasts + row, -float("inf"))
        tl.store(edges + row, tl.where(left_out > 0, edge, -float("inf")))
        tl.store(settled + row, 0)
    if is_sampled(given, row, repeat):
        i = part * BLOCK + tl.arange(0, BLOCK)
        score = penalised(given, row, i, repeat, depth, PENALTY, PATH)
        tl.store(peaks + row * tl.num_programs(0) + part, tl.max(score, 0))


@triton.jit
def _cuts_mass(given, row, repeat):
    """Whether a row's candidate must be checked, because top-p might drop it."""
    return is_sampled(given, row, repeat) & (tl.load(given.top_p + row // repeat) < 1)


@triton.jit
def _log_min_p(given, row, repeat):
    """The lowest score that min-p keeps; -inf if it is off."""
    share = tl.load(given.min_p + row // repeat)
    # In fp64, so that it is rounded as on the host.
    least = tl.log(tl.where(share > 0, share, 1.0).to(tl.float64)).to(tl.float32)
    return tl.where(share > 0, least, -float("inf"))


@triton.jit
def _drawn(score, edge, least, seed, position, i, size, BLOCK: tl.constexpr):
    """Score plus noise of those tokens `i` above the edge that the filters keep; -inf for the others."""
    kept = (score > edge) & (score >= least) & (i < size)
    value = tl.full([BLOCK], -float("inf"), tl.float64)
    # The filters leave most parts empty, and noise is the most expensive step here.
    if tl.max(kept.to(tl.int32), 0) > 0:
        value = tl.where(kept, score.to(tl.float64) + gumbel(seed + i * 0, position + i * 0, i), value)
    return value


@triton.jit
def _mass(score, edge, least):
    """The unnormalised probability above the edge and in total, of scores that top-k keeps."""
    weight = tl.where(score >= least, tl.exp(score), 0.0)
    return tl.sum(tl.where(score > edge, weight, 0.0), 0), tl.sum(weight, 0)


@triton.jit
def _holds(given, masses, row, num_parts, repeat, PARTS: tl.constexpr):
    """Whether top-p keeps a row's candidate: the probability above it is less than p."""
    part = tl.arange(0, PARTS)
    at, real = masses + (row * num_parts + part) * 2, part < num_parts
    above, whole = tl.load(at, mask=real, other=0.0), tl.load(at + 1, mask=real, other=0.0)
    return tl.sum(above, 0) < tl.load(given.top_p + row // repeat) * tl.sum(whole, 0)


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
@triton.jit(do_not_specialize=["repeat", "depth", "ahead"])
def _pick_kernel(
    given, seeds, positions, peaks, leasts, edges, masses, settled, settling, best, token,
    repeat, depth, ahead,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PENALTY: tl.constexpr, PATH: tl.constexpr,
    SAMPLED: tl.constexpr, AGAIN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best token of a part. With AGAIN only for rows whose candidate was dropped, among better tokens:
    `settled` says which rows were done before, and `settling` is set to which are done now."""
    await_turn(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    needed = True
    if AGAIN:
        needed = (tl.load(settled + row) == 0) & _cuts_mass(given, row, repeat)
        if needed:
            needed = not _holds(given, masses, row, tl.num_programs(0), repeat, PARTS)
        if part == 0:
            tl.store(settling + row, tl.where(needed, 0, 1))
    if needed:
        i = part * BLOCK + tl.arange(0, BLOCK)
        # A greedy row has no noise.
        value = tl.full([BLOCK], -float("inf"), tl.float64)
        chance = SAMPLED
        if SAMPLED:
            chance = is_sampled(given, row, repeat)
        if chance:
            peak = row_peak(peaks, row, tl.num_programs(0), PARTS)
            score = scaled(given, row, i, peak, repeat, depth, PENALTY, PATH)
            seed, position = tl.load(seeds + row // repeat), tl.load(positions + row) + ahead
            edge, least = tl.load(edges + row), tl.load(leasts + row)
            least = tl.maximum(least, _log_min_p(given, row, repeat))
            value = _drawn(score, edge, least, seed, position, i, given.size, BLOCK)
        else:
            value = penalised(given, row, i, repeat, depth, PENALTY, PATH).to(tl.float64)
        most = tl.max(value, 0)
        place = row * tl.num_programs(0) + part
        tl.store(best + place, most)
        first = tl.min(tl.where((value == most) & (i < given.size), i, given.size - 1), 0)
        tl.store(token + place, first)


@launched
@triton.jit(do_not_specialize=["repeat", "depth"])
def _check_kernel(
    given, peaks, leasts, edges, masses, settled, best, token, out, repeat, depth,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PENALTY: tl.constexpr, PATH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A part's share of the sums that top-p needs for the row's candidate; also writes the row's token."""
    await_turn(OVERLAP)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    cuts = _cuts_mass(given, row, repeat)
    if (tl.load(settled + row) == 0) & (cuts | (part == 0)):
        most, winner = _winner(best, token, row, tl.num_programs(0), PARTS)
        if part == 0:
            tl.store(out + row, winner.to(tl.int64))
        if cuts:
            peak = row_peak(peaks, row, tl.num_programs(0), PARTS)
            edge = scaled(given, row, winner, peak, repeat, depth, PENALTY, PATH)
            if part == 0:
                tl.store(edges + row, edge)
            i = part * BLOCK + tl.arange(0, BLOCK)
            score = scaled(given, row, i, peak, repeat, depth, PENALTY, PATH)
            above, whole = _mass(score, edge, tl.load(leasts + row))
            # If all scores are -inf or nan, accept the candidate.
            above = tl.where(most == -float("inf"), -1.0, above)
            place = (row * tl.num_programs(0) + part) * 2
            tl.store(masses + place, above)
            tl.store(masses + place + 1, whole)


@launched
@triton.jit(do_not_specialize=["num_parts", "repeat", "depth", "ahead"])
def _finish_kernel(
    given, seeds, positions, peaks, leasts, edges, masses, settled, out, num_parts, repeat, depth, ahead,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PENALTY: tl.constexpr, PATH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Repeat the draw, with one program per row, until top-p keeps a candidate."""
    await_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    holds = (tl.load(settled + row) != 0) | (not _cuts_mass(given, row, repeat))
    if not holds:
        holds = _holds(given, masses, row, num_parts, repeat, PARTS)
    if holds:
        return
    peak, edge, least = row_peak(peaks, row, num_parts, PARTS), tl.load(edges + row), tl.load(leasts + row)
    seed, position = tl.load(seeds + row // repeat), tl.load(positions + row) + ahead
    top_p, kept = tl.load(given.top_p + row // repeat), tl.maximum(least, _log_min_p(given, row, repeat))
    while not holds:
        most, winner = tl.full([], -float("inf"), tl.float64), tl.zeros([], tl.int32) + given.size - 1
        for part in tl.range(0, num_parts):
            i = part * BLOCK + tl.arange(0, BLOCK)
            score = scaled(given, row, i, peak, repeat, depth, PENALTY, PATH)
            value = _drawn(score, edge, kept, seed, position, i, given.size, BLOCK)
            here = tl.max(value, 0)
            first = tl.min(tl.where((value == here) & (i < given.size), i, given.size - 1), 0)
            winner = tl.where(here > most, first, winner)
            most = tl.maximum(most, here)
        edge = scaled(given, row, winner, peak, repeat, depth, PENALTY, PATH)
        above, whole = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
        for part in tl.range(0, num_parts):
            i = part * BLOCK + tl.arange(0, BLOCK)
            score = scaled(given, row, i, peak, repeat, depth, PENALTY, PATH)
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


def choose_tokens(
    logits: Tensor,
    sampling: RowSampling,
    seeds: Tensor,
    positions: Tensor,
    sampled: bool,
    ahead: int = 0,
    path: tuple[Tensor, Tensor, int] | None = None,
) -> Tensor:
    """The token of each row, int64 [R]: what `longspec.decoding.choose.choose` gives with the row's settings.

    logits are fp32 [R, V] with contiguous rows; row r belongs to sequence row r // (R / B) of `sampling` and
    of seeds, int64 [B]. positions are int64 [R]; the chosen tokens are `ahead` positions after them. If not
    `sampled`, all rows are greedy without a penalty, and their settings are not read.

    `path` is for trees: the nodes' tokens and parents, int64 [B, N] with N = R / B, and the largest depth.
    Then the tokens of a row's node and of its ancestors count as seen, too.
    """
    (R, V), device = logits.shape, logits.device
    assert logits.dtype == torch.float32, "scores must be fp32: rounded ones would often tie"
    assert logits.stride(1) == 1
    repeat = R // seeds.shape[0]
    marks = sampling.seen.view(torch.uint8) if sampled and sampling.seen is not None else None
    tokens, parents, depth = path if path is not None else (positions, positions, 0)
    given = Scores(
        logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.penalty,
        logits if marks is None else marks, tokens.contiguous(), parents.contiguous(),
        logits.stride(0), 0 if marks is None else marks.stride(0), V,
    )  # fmt: skip
    num_parts = triton.cdiv(V, _BLOCK)
    grid, parts = (num_parts, R), {"PARTS": triton.next_power_of_2(num_parts)}
    penalty = marks is not None
    blocks = {"BLOCK": _BLOCK, "PENALTY": penalty, "PATH": penalty and path is not None, **overlap(device)}
    best = torch.empty(R, num_parts, dtype=torch.float64, device=device)
    token = torch.empty(R, num_parts, dtype=torch.int32, device=device)
    out = torch.empty(R, dtype=torch.int64, device=device)
    if not sampled:
        _pick_kernel[grid](
            given, *[logits] * 8, best, token, repeat, depth, ahead, SAMPLED=False, AGAIN=False,
            **blocks, **parts,
        )  # fmt: skip
        _best_kernel[(R,)](best, token, out, num_parts, **parts, **overlap(device))
        return out
    peaks, masses = logits.new_empty(R, num_parts), logits.new_empty(R, num_parts, 2)
    leasts, edges = logits.new_empty(2, R).unbind(0)
    # One row for each turn, because a turn must not write what other programs still read in that turn.
    settled = torch.empty(_DRAWS, R, dtype=torch.int32, device=device)
    _peak_kernel[grid](given, peaks, leasts, edges, settled[0], repeat, depth, **blocks)
    keep_top_k(given, peaks, leasts, repeat, depth, blocks)
    # Seeds may be one expanded number.
    chance = (seeds.contiguous(), positions.contiguous(), peaks, leasts, edges, masses)
    for turn in range(_DRAWS):
        _pick_kernel[grid](
            given, *chance, settled[turn - 1], settled[turn], best, token, repeat, depth, ahead,
            SAMPLED=True, AGAIN=turn > 0, **blocks, **parts,
        )  # fmt: skip
        _check_kernel[grid](
            given, *chance[2:], settled[turn], best, token, out, repeat, depth, **blocks, **parts
        )
    _finish_kernel[(R,)](
        given, *chance, settled[-1], out, num_parts, repeat, depth, ahead, **blocks, **parts
    )  # fmt: skip
    return out
