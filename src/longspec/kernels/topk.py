"""The next level of a draft tree: log-softmax, top-k of each node, and the best of a whole level."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap
from longspec.kernels.tree import Levels

_CHUNKS = 32  # per program of the first kernel
_FEW = 512  # up to this many chunks one warp is faster than several, which would have to communicate
# Below every ordered score, and above every index.
_REMOVED = tl.constexpr(-(2**31))
_BEYOND = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(value):
    """An int32 that has the same order as the fp32 value."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(ordered, index, count, COUNT: tl.constexpr):
    """The `count` largest, largest first, in tiles of COUNT; of equal ones the smallest index comes first.

    They are int32, because a warp finds the largest int32 with a single instruction.
    """
    slot = tl.arange(0, COUNT)
    chosen = tl.full([COUNT], _REMOVED, tl.int32)
    places = tl.full([COUNT], 0, tl.int32)
    for turn in tl.range(0, count):
        best = tl.max(ordered, 0)
        place = tl.min(tl.where(ordered == best, index, _BEYOND), 0)
        chosen = tl.where(slot == turn, best, chosen)
        places = tl.where(slot == turn, place, places)
        ordered = tl.where(index == place, _REMOVED, ordered)
    return chosen, places


@triton.jit
def _noisy(logits, noise, i, inside, temperature, NOISE: tl.constexpr):
    """Scores of a node's tokens `i`; -inf outside. A row at temperature 0 keeps its logits."""
    x = tl.load(logits + i, mask=inside, other=-float("inf"))
    if NOISE:
        degrees = tl.load(temperature)
        if degrees > 0:
            x = tl.div_rn(x, degrees) + tl.load(noise + i, mask=inside, other=0.0)
    return tl.where(x == x, x, -float("inf"))  # nan would break the order


@launched
@triton.jit(do_not_specialize=["num_nodes", "num_chunks"])
def _chunk_kernel(
    logits, noise, highs, sums, size, num_nodes, num_chunks, temperature,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, NOISE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The best score of each chunk of a node's vocabulary, and the chunk's sum for the softmax."""
    await_turn(OVERLAP)
    node, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    i = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    row = node // num_nodes
    x = _noisy(logits + node * size, noise + row * size, i, i < size, temperature + row, NOISE)
    high = tl.max(x, 1)
    base = tl.where(high == -float("inf"), 0.0, high)
    place = node * num_chunks + chunk
    tl.store(highs + place, high, mask=chunk < num_chunks)
    tl.store(sums + place, tl.sum(tl.exp(x - base[:, None]), 1), mask=chunk < num_chunks)


@launched
@triton.jit(do_not_specialize=["count", "num_nodes", "num_chunks"])
def _node_kernel(
    logits, noise, highs, sums, above, scores, tokens,
    size, count, num_nodes, num_chunks, above_b, temperature,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr, NOISE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A node's best `count` children; their scores are log-probability plus the node's own score.

    They are in the `count` chunks with the highest best scores, because each of those has one such child.
    """
    await_turn(OVERLAP)
    node = tl.program_id(0).to(tl.int64)
    row = node // num_nodes
    chunk, slot = tl.arange(0, CHUNKS), tl.arange(0, COUNT)
    real = chunk < num_chunks
    high = tl.load(highs + node * num_chunks + chunk, mask=real, other=-float("inf"))
    total = tl.load(sums + node * num_chunks + chunk, mask=real, other=0.0)
    parent = tl.load(above + row * above_b + node % num_nodes)
    best, index = _best(tl.where(real, _ordered(high), _REMOVED), chunk, tl.minimum(count, num_chunks), COUNT)
    i = index[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = (best != _REMOVED)[:, None] & (i < size)
    x = _noisy(logits + node * size, noise + row * size, i, inside, temperature + row, NOISE)
    peak = tl.max(high, 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    lse = base + tl.log(tl.sum(total * tl.exp(high - base), 0))
    ordered = tl.reshape(tl.where(inside, _ordered(x), _REMOVED), [COUNT * CHUNK])
    best, index = _best(ordered, tl.reshape(i, [COUNT * CHUNK]), count, COUNT)
    value = _value_of(best)
    score = tl.where(value == -float("inf"), -float("inf"), parent + (value - lse))
    tl.store(scores + node * count + slot, score, mask=slot < count)
    tl.store(tokens + node * count + slot, index, mask=slot < count)


@launched
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
    best, index = _best(tl.where(i < num, _ordered(score), _REMOVED), i, width, WIDTH)
    wanted = slot < width
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
    temperature: Tensor | None = None,
    noise: Tensor | None = None,
    token_ids: Tensor | None = None,
) -> None:
    """Append the `width` best children of a tree's last level to the tree, best first.

    logits fp32 [B, n, V] are those of the nodes in `level`. A child's score is its node's score plus its
    log-probability, from the logits or, with `noise` [B, V] and `temperature` [B], both fp32, from
    logits / temperature + noise; a row at temperature 0 keeps its logits. The child's token is its index in
    the vocabulary, or token_ids [V] at that index. There must be at least `width` children.
    """
    B, n, V = logits.shape
    logits = logits.contiguous()
    count = min(width, V)
    # Both the chunks and the numbers in a chunk are searched one by one, so neither should be many.
    chunk = 32 if V <= 1 << 16 else 64
    num_chunks = triton.cdiv(V, chunk)
    device = logits.device
    highs, sums = torch.empty(2, B * n, num_chunks, dtype=torch.float32, device=device).unbind(0)
    noisy = {"CHUNK": chunk, "NOISE": noise is not None, **overlap(device)}
    assert noise is None or temperature is not None, "noise needs the temperature"
    given = (logits, logits if noise is None else noise.contiguous())
    degrees = logits if temperature is None else temperature
    _chunk_kernel[(triton.cdiv(num_chunks, _CHUNKS), B * n)](
        *given, highs, sums, V, n, num_chunks, degrees, CHUNKS=_CHUNKS, num_warps=4, **noisy
    )  # fmt: skip
    tokens, parents, scores = (part[:, level.stop :] for part in tree)
    node_scores = torch.empty(B, n * count, dtype=torch.float32, device=device)
    node_tokens = torch.empty(B, n * count, dtype=torch.int32, device=device)
    _node_kernel[(B * n,)](
        *given, highs, sums, tree[2][:, level.start :], node_scores, node_tokens,
        V, count, n, num_chunks, scores.stride(0), degrees,
        CHUNKS=triton.next_power_of_2(num_chunks), COUNT=triton.next_power_of_2(count),
        num_warps=1 if num_chunks <= _FEW else 4, **noisy,
    )  # fmt: skip
    _level_kernel[(B,)](
        node_scores, node_tokens, node_tokens if token_ids is None else token_ids, tokens, parents, scores,
        count, n, width, level.start, scores.stride(0), BLOCK=triton.next_power_of_2(n * count),
        WIDTH=triton.next_power_of_2(width), NAMED=token_ids is not None, num_warps=1, **overlap(device),
    )  # fmt: skip
