"""Lookup in two launches: if a text repeats itself, what followed last time joins the draft's tree.

The kernels search the text for an earlier occurrence of its last tokens, as many as possible. What followed
there becomes a chain under the root; nodes that the tree already has are reused.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap
from longspec.kernels.tree import Levels

_BLOCK = 2048
# A match is one number, so that the largest is the best: the run's length in the high bits, then the place.
_SHIFT = tl.constexpr(32)


@launched
@triton.jit(do_not_specialize=["text_b"])
def _find_kernel(
    text, lengths, best, text_b, LEAST: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    b = tl.program_id(1).to(tl.int64)
    first, end = tl.program_id(0) * BLOCK, tl.load(lengths + b) + 1
    if first >= end:
        return
    place = first + tl.arange(0, BLOCK).to(tl.int64)
    text += b * text_b
    alike = place < end
    runs = tl.zeros([BLOCK], tl.int64)
    for back in tl.static_range(1, MOST + 1):
        last = tl.load(text + tl.maximum(end - back, 0))
        alike = alike & (place >= back)
        alike = alike & (tl.load(text + place - back, mask=alike, other=-1) == last)
        runs += alike.to(tl.int64)
    found = tl.max(tl.where(runs >= LEAST, (runs << _SHIFT) + place, 0), 0)
    if found > 0:
        tl.atomic_max(best + b, found)


@launched
@triton.jit(do_not_specialize=["num_nodes", "num_drafted", "num_added", "text_b", "doubt", "fade"])
def _graft_kernel(
    tokens, parents, scores, text, best, lengths, num_nodes, num_drafted, num_added, text_b, doubt, fade,
    LEAST: tl.constexpr, NODES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    b, index = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    tokens += b * num_nodes
    parents += b * num_nodes
    scores += b * num_nodes
    real = (index > 0) & (index < num_drafted)
    token = tl.load(tokens + index, mask=real, other=-1)
    parent = tl.load(parents + index, mask=real, other=-1)
    root, found = tl.load(tokens), tl.load(best + b)
    runs, begin = tl.maximum((found >> _SHIFT).to(tl.float32), LEAST), found & 0xFFFFFFFF
    period = tl.maximum(tl.load(lengths + b) + 1 - begin, 1)
    node = tl.zeros([], tl.int64)
    score = tl.log(1 - doubt / (runs * runs))
    further = tl.log(1 - fade / runs)
    for step in tl.range(0, num_added):
        # Past the end of the text, continue from the match again, because then the text is a loop.
        follower = tl.load(text + b * text_b + begin + step % period, mask=found > 0, other=0)
        child = tl.min(tl.where(real & (parent == node) & (token == follower), index, NODES), 0)
        there, here = (found > 0) & (child < NODES), (num_drafted + step).to(tl.int64)
        new = (found > 0) & (child >= NODES)
        if there:
            tl.store(scores + child, tl.maximum(tl.load(scores + child), score))
        tl.store(tokens + here, tl.where(new, follower, root))
        tl.store(parents + here, tl.where(new, node, 0))
        tl.store(scores + here, tl.where(new, score, -float("inf")))
        node = tl.where(there, child.to(tl.int64), tl.where(new, here, node))
        score += further
    tl.store(best + b, found * 0)


def graft_lookup(
    tree: Levels,
    num_drafted: int,
    text: Tensor,
    best: Tensor,
    lengths: Tensor,
    chances: tuple[int, int, float, float],
) -> None:
    """Fill the nodes after the first `num_drafted` (at least 1) with what followed the text's last tokens at
    their earlier occurrence.

    text is int64 [B, S']: lengths [B] tokens and then the root. best, int64 [B], is scratch memory: 0 before
    and after. The chances are the shortest and the longest run to look for, and doubt and fade: after a run
    of n, the first token is right with probability 1 - doubt / n^2, each further one with 1 - fade / n. A
    node that the tree already has gets at least this score. A node that is not needed repeats the root and
    scores -inf.
    """
    tokens, parents, scores = tree
    least, most, doubt, fade = chances
    B, N = tokens.shape
    early = overlap(tokens.device)
    _find_kernel[(triton.cdiv(text.shape[1], _BLOCK), B)](
        text, lengths, best, text.stride(0), LEAST=least, MOST=most, BLOCK=_BLOCK, **early
    )
    _graft_kernel[(B,)](
        tokens, parents, scores, text, best, lengths, N, num_drafted, N - num_drafted, text.stride(0),
        doubt, fade, LEAST=least, NODES=triton.next_power_of_2(num_drafted), num_warps=1, **early,
    )  # fmt: skip
