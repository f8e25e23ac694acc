"""The end of a round in one launch: what the target would have said, and what that makes of each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap


@launched
@triton.jit(do_not_specialize=["num_nodes", "width", "num_ends", "hidden_size"])
def _settle_kernel(
    tokens, parents, choices, hidden, running, lengths, limits, ends,
    path, num_kept, before, emitted, num_emitted, report, feature,
    num_nodes, width, num_ends, hidden_size,
    NODES: tl.constexpr, WIDTH: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    node, step = tl.arange(0, NODES), tl.arange(0, WIDTH)
    tokens += row * num_nodes
    choices += row * num_nodes
    token = tl.load(tokens + node, mask=node < num_nodes, other=-1)
    parent = tl.load(parents + row * num_nodes + node, mask=node < num_nodes, other=-1)
    runs = tl.load(running + row) != 0
    root = tl.load(tokens)

    here = tl.zeros([], tl.int32)
    moving = here == 0
    count = tl.zeros([], tl.int64)
    nodes = tl.zeros([WIDTH], tl.int32)
    said = tl.zeros([WIDTH], tl.int64) + tl.load(choices)
    for depth in tl.range(1, width):
        choice = tl.load(choices + here)
        # The root is nobody's child.
        matches = (parent == here) & (token == choice) & (node > 0) & (node < num_nodes)
        child = tl.min(tl.where(matches, node, NODES), 0)
        moving = moving & (child < NODES)
        here = tl.where(moving, child, here)
        count += moving.to(tl.int64)
        nodes = tl.where(step == depth, here, nodes)
        # The target's own choice at the last node that was kept stands behind it, and then again and again.
        said = tl.where(step >= depth, tl.load(choices + here), said)

    kept = step < width
    tl.store(path + row * width + step, nodes.to(tl.int64), mask=kept)
    tl.store(num_kept + row, tl.where(runs, count + 1, 0))
    said = tl.where(runs | (step > 0), said, root)
    total = tl.where(runs, count + 1, 1)
    tl.store(emitted + row * width + step, said, mask=kept)
    tl.store(num_emitted + row, total)
    tl.store(report + row * (width + 1) + 1 + step, said, mask=kept)
    tl.store(report + row * (width + 1), tl.where(runs, total, 0))

    end = tl.load(ends + tl.arange(0, ENDS), mask=tl.arange(0, ENDS) < num_ends, other=-1)
    hits = (
        (said[:, None] == end[None, :]) & (step < total)[:, None] & (tl.arange(0, ENDS) < num_ends)[None, :]
    )
    old, limit = tl.load(lengths + row), tl.load(limits + row)
    length = old + tl.where(runs, count + 1, 0)
    ended = (tl.sum(tl.sum(hits.to(tl.int32), 1), 0) > 0) | (length + 1 >= limit)
    tl.store(before + row, old)
    # A round may run past a row's limit; there is room for its nodes only behind the limit itself.
    tl.store(lengths + row, tl.minimum(length, limit - 1))
    tl.store(running + row, tl.where(ended, 0, runs.to(tl.int8)).to(tl.int8))
    if runs:
        for first in tl.range(0, hidden_size, BLOCK):
            i = first + tl.arange(0, BLOCK)
            state = tl.load(hidden + (row * num_nodes + here) * hidden_size + i, mask=i < hidden_size)
            tl.store(feature + row * hidden_size + i, state, mask=i < hidden_size)


def settle_round(
    tokens: Tensor,
    parents: Tensor,
    choices: Tensor,
    hidden: Tensor,
    lengths: Tensor,
    limits: Tensor,
    ends: Tensor,
    running: Tensor,
    emitted: Tensor,
    num_emitted: Tensor,
    report: Tensor,
    feature: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root to the last node that the target would have said, and note what follows from it.

    Returns the nodes from the root on, int64 [B, P], the last one repeated; how many of them are to be
    kept, the root among them, int64 [B]: none in a row that stands still; and the lengths of before.

    tokens, parents and the target's choices are int64 [B, N], hidden its states [B, N, E], lengths and
    limits int64 [B], ends int64 [n]. Changed in place: the lengths, running bool [B], emitted int64 [B, P]
    and num_emitted [B] (see `DecodeState`), report [B, 1 + P] (see `Board`), feature [B, E].
    The walk goes P - 1 nodes below the root at most.
    """
    B, N = tokens.shape
    width, hidden_size = emitted.shape[1], hidden.shape[2]
    path, num_kept, before = (torch.empty_like(x) for x in (emitted, num_emitted, lengths))
    _settle_kernel[(B,)](
        tokens.contiguous(), parents.contiguous(), choices.contiguous(), hidden.contiguous(),
        running.view(torch.int8), lengths, limits, ends,
        path, num_kept, before, emitted, num_emitted, report, feature, N, width, ends.shape[0], hidden_size,
        NODES=triton.next_power_of_2(N), WIDTH=triton.next_power_of_2(width),
        ENDS=triton.next_power_of_2(ends.shape[0]), BLOCK=min(1024, triton.next_power_of_2(hidden_size)),
        **overlap(tokens.device),
    )  # fmt: skip
    return path, num_kept, before
