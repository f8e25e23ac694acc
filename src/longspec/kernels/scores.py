"""Scores of rows that each have their own settings, as the kernels that choose tokens read them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

# The least temperature that divides: smaller ones are 0 in fp32.
_LEAST_TEMPERATURE = tl.constexpr(1.1754943508222875e-38)


class Scores(NamedTuple):
    """What kernels are given of all rows. R rows of logits belong to B sequence rows, N = R / B each."""

    logits: Tensor
    """fp32 [R, V]"""
    temperature: Tensor
    """fp32 [B], as the next four, but for top_k, int64."""
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    seen: Tensor
    """uint8 [B, V]: which tokens occurred before."""
    tokens: Tensor
    """Of a tree's nodes, int64 [B, N], as their parents: a node's ancestors have occurred before, too."""
    parents: Tensor
    logits_r: int
    seen_b: int
    size: int
    """V"""


@triton.jit
def penalised(given, row, i, repeat, depth, PENALTY: tl.constexpr, PATH: tl.constexpr) -> tl.tensor:
    """Scores of a row's tokens `i`, those that occurred made less probable; -inf outside and for nan.

    With PATH also those of the row's node and its ancestors, at most `depth` steps away, occurred.
    """
    inside = i < given.size
    score = tl.load(given.logits + row * given.logits_r + i, mask=inside, other=-float("inf"))
    if PENALTY:
        b, node = row // repeat, row % repeat
        penalty = tl.load(given.penalty + b)
        if penalty != 1:
            had = tl.load(given.seen + b * given.seen_b + i, mask=inside, other=0) != 0
            if PATH:
                for _ in tl.range(0, depth + 1):
                    had = had | (i == tl.load(given.tokens + b * repeat + node))
                    node = tl.load(given.parents + b * repeat + node)
            less = tl.where(score > 0, tl.div_rn(score, penalty), score * penalty)
            score = tl.where(had, less, score)
    return tl.where(score == score, score, -float("inf"))


@triton.jit
def scaled(given, row, i, peak, repeat, depth, PENALTY: tl.constexpr, PATH: tl.constexpr) -> tl.tensor:
    """How far scores lie below the row's best, `peak`, by the temperature: 0 or less."""
    score = penalised(given, row, i, repeat, depth, PENALTY, PATH)
    return tl.div_rn(score - peak, row_temperature(given, row, repeat))


@triton.jit
def row_temperature(given, row, repeat) -> tl.tensor:
    """The temperature of a row that is sampled."""
    return tl.maximum(tl.load(given.temperature + row // repeat), _LEAST_TEMPERATURE)


@triton.jit
def is_sampled(given, row, repeat) -> tl.tensor:
    """Whether chance has a say; otherwise the row's best token is chosen."""
    return tl.load(given.temperature + row // repeat) > 0


@triton.jit
def row_peak(peaks, row, num_parts, PARTS: tl.constexpr) -> tl.tensor:
    """A row's best score, from those of its parts."""
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(peaks + row * num_parts + part, mask=part < num_parts, other=-float("inf")), 0)
