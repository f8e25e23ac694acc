"""The end of a round in one launch: accept the nodes that the target chooses too, and update the rows."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap

# The largest finite number.
MOST = tl.constexpr(3.4028234663852886e38)


class SettledRows(Protocol):
    """The state of B rows that a round changes. A row moves if it is running and active."""

    @property
    def lengths(self) -> Tensor:
        """Of the prefix, int64 [B]; the root is the next token of the text."""

    @property
    def limits(self) -> Tensor:
        """The length of text at which the row ends, int64 [B]."""

    @property
    def eos_ids(self) -> Tensor:
        """The tokens that end a row, int64 [B, E], padded with -1; E is a power of two."""

    @property
    def running(self) -> Tensor:
        """Whether the row has not ended yet, bool [B]."""

    @property
    def active(self) -> Tensor:
        """Whether the row takes part in this round, bool [B]."""

    @property
    def num_unread(self) -> Tensor:
        """How many of the newest tokens the draft has not read, int64 [B]."""

    @property
    def report(self) -> Tensor:
        """For the host, int64 [B, 1 + width] or wider: how many tokens this round emitted (0 if the row did
        not move), then the tokens. The first one is -1 if the hidden state is not finite, because the choices
        then mean nothing."""

    @property
    def feature(self) -> Tensor:
        """The target's hidden state at the last kept node, [B, hidden]."""

    @property
    def text(self) -> Tensor:
        """All tokens of a row, int64 [B, S']."""

    @property
    def seen(self) -> Tensor | None:
        """Which tokens occurred in the text, bool [B, V]."""


@launched
@triton.jit(
    do_not_specialize=[
        "num_nodes", "width", "hidden_size", "eos_b", "report_b", "feature_b", "text_b", "seen_b"
    ]
)  # fmt: skip
def _settle_kernel(
    tokens, parents, choices, hidden, lengths, limits, eos_ids, running, active, num_unread, report, feature,
    text, seen, path, num_kept, before,
    num_nodes, width, hidden_size, eos_b, report_b, feature_b, text_b, seen_b,
    NODES: tl.constexpr, WIDTH: tl.constexpr, NUM_EOS: tl.constexpr, SEEN: tl.constexpr, BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    old, step = tl.load(lengths + row), tl.arange(0, WIDTH)
    moves = (tl.load(running + row) != 0) & (tl.load(active + row) != 0)
    tl.store(before + row, old)
    if not moves:
        tl.store(path + row * width + step, tl.zeros([WIDTH], tl.int64), mask=step < width)
        tl.store(num_kept + row, old * 0)
        tl.store(report + row * report_b, old * 0)
        return

    node = tl.arange(0, NODES)
    choices += row * num_nodes
    token = tl.load(tokens + row * num_nodes + node, mask=node < num_nodes, other=-1)
    parent = tl.load(parents + row * num_nodes + node, mask=node < num_nodes, other=-1)
    here = tl.zeros([], tl.int32)
    goes_on = here == 0
    total = tl.full([], 1, tl.int64)
    nodes = tl.zeros([WIDTH], tl.int32)
    said = tl.zeros([WIDTH], tl.int64) + tl.load(choices)
    for depth in tl.range(1, width):
        choice = tl.load(choices + here)
        # The root is not a child.
        matches = (parent == here) & (token == choice) & (node > 0) & (node < num_nodes)
        child = tl.min(tl.where(matches, node, NODES), 0)
        goes_on = goes_on & (child < NODES)
        here = tl.where(goes_on, child, here)
        total += goes_on.to(tl.int64)
        nodes = tl.where(step == depth, here, nodes)
        # The target's choice at the last kept node comes next, and fills the rest of the row.
        said = tl.where(step >= depth, tl.load(choices + here), said)

    is_finite = tl.full([], 1, tl.int32)
    for first in tl.range(0, hidden_size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        state = tl.load(hidden + (row * num_nodes + here) * hidden_size + i, mask=i < hidden_size, other=0)
        tl.store(feature + row * feature_b + i, state, mask=i < hidden_size)
        is_finite = tl.minimum(is_finite, tl.min((tl.abs(state.to(tl.float32)) <= MOST).to(tl.int32), 0))

    tl.store(path + row * width + step, nodes.to(tl.int64), mask=step < width)
    tl.store(num_kept + row, total)
    unread = total
    if ACCUMULATE:
        unread += tl.load(num_unread + row)
    tl.store(num_unread + row, unread)
    reported = tl.where((is_finite == 0) & (step == 0), -1, said)
    tl.store(report + row * report_b + 1 + step, reported, mask=step < width)
    tl.store(report + row * report_b, total)
    emitted, limit = step < total, tl.load(limits + row)
    tl.store(text + row * text_b + old + 1 + step, said, mask=emitted & (old + 1 + step < limit))
    if SEEN:
        tl.store(seen + row * seen_b + said, tl.full([WIDTH], 1, tl.uint8), mask=emitted)

    eos = tl.load(eos_ids + row * eos_b + tl.arange(0, NUM_EOS))
    hits = (said[:, None] == eos[None, :]) & emitted[:, None]
    length = old + total
    ended = (tl.sum(tl.sum(hits.to(tl.int32), 1), 0) > 0) | (length + 1 >= limit)
    # A round may pass the row's limit. Clamp the length: only up to the limit is there room for a tree.
    tl.store(lengths + row, tl.minimum(length, limit - 1))
    tl.store(running + row, tl.where(ended, 0, 1).to(tl.uint8))


def settle_round(
    tokens: Tensor,
    parents: Tensor,
    choices: Tensor,
    hidden: Tensor,
    rows: SettledRows,
    width: int,
    accumulate: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root along the target's choices to the last accepted node, and update the rows.

    Returns the path from the root, int64 [B, width], its last node repeated; how many of its nodes to keep,
    with the root, int64 [B] (0 in a row that does not move); and the lengths before the round.

    tokens, parents and the target's choices are int64 [B, N], hidden its states [B, N, hidden]. A round emits
    at most `width` tokens, so the walk goes at most width - 1 nodes below the root. Emitted tokens go into
    the text (up to the row's limit), into `seen` and into the report. With `accumulate`, the draft has not
    read the tokens of earlier rounds either.
    """
    B, N = tokens.shape
    hidden_size, num_eos = hidden.shape[2], rows.eos_ids.shape[1]
    assert num_eos & (num_eos - 1) == 0, f"a row has {num_eos} eos ids; it must be a power of two"
    assert rows.report.shape[1] > width
    path = torch.empty(B, width, dtype=torch.int64, device=tokens.device)
    num_kept, before = torch.empty(2, B, dtype=torch.int64, device=tokens.device).unbind(0)
    seen = None if rows.seen is None else rows.seen.view(torch.uint8)
    _settle_kernel[(B,)](
        tokens.contiguous(), parents.contiguous(), choices.contiguous(), hidden.contiguous(),
        rows.lengths, rows.limits, rows.eos_ids, rows.running.view(torch.uint8),
        rows.active.view(torch.uint8), rows.num_unread, rows.report, rows.feature, rows.text,
        rows.text if seen is None else seen, path, num_kept, before, N, width, hidden_size,
        rows.eos_ids.stride(0), rows.report.stride(0), rows.feature.stride(0), rows.text.stride(0),
        0 if seen is None else seen.stride(0),
        NODES=triton.next_power_of_2(N), WIDTH=triton.next_power_of_2(width), NUM_EOS=num_eos,
        SEEN=seen is not None, BLOCK=min(1024, triton.next_power_of_2(hidden_size)),
        ACCUMULATE=accumulate, **overlap(tokens.device),
    )  # fmt: skip
    return path, num_kept, before
