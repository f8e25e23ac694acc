"""The next level of a draft tree: log-softmax, top-k of each node, and the best of a whole level."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, overlap
from longspec.kernels.tree import Levels

_BLOCK, _WARPS, _FEW = 2048, 4, 1
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


@triton.jit
def _best(key, count, COUNT: tl.constexpr):
    """The largest `count` of the keys, largest first, in a tile of COUNT."""
    slot = tl.arange(0, COUNT)
    chosen = tl.full([COUNT], _REMOVED, tl.int64)
    for turn in tl.range(0, count):
        best = tl.max(key, 0)
        chosen = tl.where(slot == turn, best, chosen)
        key = tl.where(key == best, _REMOVED, key)
    return chosen


@triton.jit(do_not_specialize=["count", "num_nodes"])
def _part_kernel(
    logits, noise, keys, highs, sums, size, count, num_nodes, temperature,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, NOISE: tl.constexpr, OVERLAP: tl.constexpr,
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
    slot = tl.arange(0, COUNT)
    best = _best(tl.where(i < size, _key(x, i), _REMOVED), count, COUNT)
    tl.store(keys + place * count + slot, best, mask=slot < count)


@triton.jit(do_not_specialize=["count", "num_nodes", "num_parts"])
def _node_kernel(
    keys, highs, sums, above, scores, tokens, count, num_nodes, num_parts, above_b,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best `count` of a node's parts, with their log-probability and the node's own score."""
    await_turn(OVERLAP)
    node = tl.program_id(0).to(tl.int64)
    part, slot, i = tl.arange(0, PARTS), tl.arange(0, COUNT), tl.arange(0, BLOCK)
    high = tl.load(highs + node * num_parts + part, mask=part < num_parts, other=-float("inf"))
    total = tl.load(sums + node * num_parts + part, mask=part < num_parts, other=0.0)
    key = tl.load(keys + node * num_parts * count + i, mask=i < num_parts * count, other=_REMOVED)
    parent = tl.load(above + node // num_nodes * above_b + node % num_nodes)
    peak = tl.max(high, 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    lse = base + tl.log(tl.sum(total * tl.exp(high - base), 0))
    best = _best(key, count, COUNT)
    value = _value_of(best)
    score = tl.where(value == -float("inf"), -float("inf"), parent + (value - lse))
    tl.store(scores + node * count + slot, score, mask=slot < count)
    tl.store(tokens + node * count + slot, _index_of(best), mask=slot < count)


@triton.jit(do_not_specialize=["count", "num_nodes", "width", "first"])
def _level_kernel(
    scores, tokens, token_ids, out_tokens, out_parents, out_scores, count, num_nodes, width, first, out_b,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, NAMED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best `width` children of a row's nodes."""
    await_turn(OVERLAP)
    row, i, slot = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    num = num_nodes * count
    score = tl.load(scores + row * num + i, mask=i < num, other=0.0)
    best = _best(tl.where(i < num, _key(score, i), _REMOVED), width, WIDTH)
    index, wanted = _index_of(best), slot < width
    token = tl.load(tokens + row * num + index, mask=wanted, other=0).to(tl.int64)
    if NAMED:
        token = tl.load(token_ids + token, mask=wanted, other=0)
    place = row * out_b + slot
    tl.store(out_tokens + place, token, mask=wanted)
    tl.store(out_parents + place, first + (index // count).to(tl.int64), mask=wanted)
    tl.store(out_scores + place, _value_of(best), mask=wanted)


def best_children(
    logits: Tensor,
    tree: Levels,
    level: range,
    width: int,
    temperature: float = 1.0,
    noise: Tensor | None = None,
    token_ids: Tensor | None = None,
) -> None:
    """Put the `width` best children of a tree's last level behind it, best first, by their scores.

    logits fp32 [B, n, V] are those of the nodes in `level`. A child's score is its node's plus its
    log-probability: of the logits or, where `noise` [B, V] is given, of logits / temperature + noise. Its
    token is its index in the vocabulary, or what token_ids [V] has there. There must be that many.
    """
    B, n, V = logits.shape
    logits = logits.contiguous()
    count = min(width, V)
    block = min(_BLOCK, triton.next_power_of_2(V))
    num_parts = triton.cdiv(V, block)
    device = logits.device
    keys = torch.empty(B * n, num_parts, count, dtype=torch.int64, device=device)
    highs, sums = torch.empty(2, B * n, num_parts, dtype=torch.float32, device=device).unbind(0)
    wide = {"COUNT": triton.next_power_of_2(count), **overlap(device)}
    _part_kernel[(num_parts, B * n)](
        logits, logits if noise is None else noise, keys, highs, sums, V, count, n, temperature,
        BLOCK=block, NOISE=noise is not None, num_warps=_WARPS, **wide,
    )  # fmt: skip
    tokens, parents, scores = (part[:, level.stop :] for part in tree)
    node_scores = torch.empty(B, n * count, dtype=torch.float32, device=device)
    node_tokens = torch.empty(B, n * count, dtype=torch.int32, device=device)
    _node_kernel[(B * n,)](
        keys, highs, sums, tree[2][:, level.start :], node_scores, node_tokens, count, n, num_parts,
        scores.stride(0), PARTS=triton.next_power_of_2(num_parts),
        BLOCK=triton.next_power_of_2(num_parts * count), num_warps=_FEW, **wide,
    )  # fmt: skip
    _level_kernel[(B,)](
        node_scores, node_tokens, node_tokens if token_ids is None else token_ids, tokens, parents, scores,
        count, n, width, level.start, scores.stride(0), BLOCK=triton.next_power_of_2(n * count),
        WIDTH=triton.next_power_of_2(width), NAMED=token_ids is not None, num_warps=_FEW, **overlap(device),
    )  # fmt: skip
