"""How the kernels that choose tokens read the scores of rows, each with its own settings."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

# The smallest normal fp32 number: temperatures below it would divide by 0.
_LEAST_TEMPERATURE = tl.constexpr(1.1754943508222875e-38)


class Scores(NamedTuple):
    """What the kernels read of all rows. R rows of logits belong to B sequence rows, N = R / B to each."""

    logits: Tensor
    """fp32 [R, V]"""
    temperature: Tensor
    """[B], as the next four; fp32, but top_k is int64."""
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    seen: Tensor
    """uint8 [B, V]: which tokens occurred before."""
    tokens: Tensor
    """Of a tree's nodes, int64 [B, N], like their parents: a node's ancestors count as seen, too."""
    parents: Tensor
    logits_r: int
    seen_b: int
    size: int
    """V"""


@triton.jit
def penalised(given, row, i, repeat, depth, PENALTY: tl.constexpr, PATH: tl.constexpr) -> tl.tensor:
    """Scores of a row's tokens `i`, with the penalty on tokens that occurred; -inf outside and for nan.

    With PATH, the tokens of the row's node and its ancestors, at most `depth` steps away, also occurred.
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
    """(score - peak) / temperature, where `peak` is the row's best score: 0 or less."""
    score = penalised(given, row, i, repeat, depth, PENALTY, PATH)
    return tl.div_rn(score - peak, row_temperature(given, row, repeat))


@triton.jit
def row_temperature(given, row, repeat) -> tl.tensor:
    """The temperature of a row that is sampled."""
    return tl.maximum(tl.load(given.temperature + row // repeat), _LEAST_TEMPERATURE)


@triton.jit
def is_sampled(given, row, repeat) -> tl.tensor:
    """Whether the row is sampled; otherwise it is greedy."""
    return tl.load(given.temperature + row // repeat) > 0


@triton.jit
def row_peak(peaks, row, num_parts, PARTS: tl.constexpr) -> tl.tensor:
    """The best score of a row, from the best scores of its parts."""
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(peaks + row * num_parts + part, mask=part < num_parts, other=-float("inf")), 0)
