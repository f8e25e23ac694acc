"""The next level of a draft tree: log-softmax, top-k of each node, and the best of a whole level."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, overlap

_BLOCK = 8192
_REMOVED = tl.constexpr(-(2**63))


@triton.jit
def _key(value, index):
    """int64 that orders as (value, -index) do, for fp32 values and indices below 2^31."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _value_of(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _index_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["count", "num_nodes"])
def _part_kernel(
    logits, noise, keys, highs, sums, size, count, num_nodes, temperature,
    BLOCK: tl.constexpr, NOISE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best `count` of one part of a node's vocabulary, and what the part adds to the softmax."""
    await_turn(OVERLAP)
    part, node = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + node * size + i, mask=i < size, other=-float("inf"))
    if NOISE:
        extra = tl.load(noise + node // num_nodes * size + i, mask=i < size, other=0.0)
        x = tl.div_rn(x, temperature) + extra
    x = tl.where(x == x, x, -float("inf"))  # nan: nonsense, but the order must hold
    place = node * tl.num_programs(0) + part
    high = tl.max(x, 0)
    base = tl.where(high == -float("inf"), 0.0, high)
    tl.store(highs + place, high)
    tl.store(sums + place, tl.sum(tl.exp(x - base), 0))
    key = tl.where(i < size, _key(x, i), _REMOVED)
    for turn in tl.range(0, count):
        best = tl.max(key, 0)
        tl.store(keys + place * count + turn, best)
        key = tl.where(key == best, _REMOVED, key)


@triton.jit(do_not_specialize=["count", "num_parts"])
def _node_kernel(
    keys, highs, sums, parents, scores, tokens, count, num_parts,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best `count` of a node's parts, with their log-probability and the node's own score."""
    await_turn(OVERLAP)
    node = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    high = tl.load(highs + node * num_parts + part, mask=part < num_parts, other=-float("inf"))
    peak = tl.max(high, 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.load(sums + node * num_parts + part, mask=part < num_parts, other=0.0)
    lse = base + tl.log(tl.sum(total * tl.exp(high - base), 0))
    parent = tl.load(parents + node)
    i = tl.arange(0, BLOCK)
    key = tl.load(keys + node * num_parts * count + i, mask=i < num_parts * count, other=_REMOVED)
    for turn in tl.range(0, count):
        best = tl.max(key, 0)
        value = _value_of(best)
        score = tl.where(value == -float("inf"), -float("inf"), parent + (value - lse))
        tl.store(scores + node * count + turn, score)
        tl.store(tokens + node * count + turn, _index_of(best))
        key = tl.where(key == best, _REMOVED, key)


@triton.jit(do_not_specialize=["count", "num_nodes", "width", "first"])
def _level_kernel(
    scores, tokens, token_ids, out_tokens, out_parents, out_scores, count, num_nodes, width, first,
    BLOCK: tl.constexpr, NAMED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best `width` children of a row's nodes."""
    await_turn(OVERLAP)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    num = num_nodes * count
    score = tl.load(scores + row * num + i, mask=i < num, other=0.0)
    key = tl.where(i < num, _key(score, i), _REMOVED)
    for turn in tl.range(0, width):
        best = tl.max(key, 0)
        index = _index_of(best)
        token = tl.load(tokens + row * num + index).to(tl.int64)
        if NAMED:
            token = tl.load(token_ids + token)
        tl.store(out_tokens + row * width + turn, token)
        tl.store(out_parents + row * width + turn, first + (index // count).to(tl.int64))
        tl.store(out_scores + row * width + turn, _value_of(best))
        key = tl.where(key == best, _REMOVED, key)


def best_children(
    logits: Tensor,
    scores: Tensor,
    width: int,
    temperature: float = 1.0,
    noise: Tensor | None = None,
    token_ids: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` best children of a level's nodes, best first, by cumulative log-probability.

    logits fp32 [B, n, V] and scores fp32 [B, n] are the nodes'. A child's score is its node's plus its
    log-probability: of the logits or, where `noise` [B, V] is given, of logits / temperature + noise.
    Returned are the children's token (its index, or what token_ids [V] has there), their node, counted from
    `first` on, both int64, and their score, each [B, w], w at most the children there are.
    """
    B, n, V = logits.shape
    logits = logits.contiguous()
    count = min(width, V)
    width = min(width, n * count)
    block = min(_BLOCK, triton.next_power_of_2(V))
    num_parts = triton.cdiv(V, block)
    device = logits.device
    keys = torch.empty(B * n, num_parts, count, dtype=torch.int64, device=device)
    highs, sums = torch.empty(2, B * n, num_parts, dtype=torch.float32, device=device).unbind(0)
    _part_kernel[(num_parts, B * n)](
        logits, logits if noise is None else noise, keys, highs, sums, V, count, n, temperature,
        BLOCK=block, NOISE=noise is not None, num_warps=8, **overlap(logits.device),
    )  # fmt: skip
    node_scores = torch.empty(B, n * count, dtype=torch.float32, device=device)
    node_tokens = torch.empty(B, n * count, dtype=torch.int32, device=device)
    _node_kernel[(B * n,)](
        keys, highs, sums, scores.contiguous(), node_scores, node_tokens, count, num_parts,
        PARTS=triton.next_power_of_2(num_parts), BLOCK=triton.next_power_of_2(num_parts * count),
        **overlap(logits.device),
    )  # fmt: skip
    tokens, parents = torch.empty(2, B, width, dtype=torch.int64, device=device).unbind(0)
    best = torch.empty(B, width, dtype=torch.float32, device=device)
    _level_kernel[(B,)](
        node_scores, node_tokens, node_tokens if token_ids is None else token_ids, tokens, parents, best,
        count, n, width, first, BLOCK=triton.next_power_of_2(n * count), NAMED=token_ids is not None,
        **overlap(logits.device),
    )  # fmt: skip
    return tokens, parents, best
