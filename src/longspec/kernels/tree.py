"""The bookkeeping of token trees: which node sees what, positions and entries, which nodes to keep.

These are only a few numbers. On a GPU the launches take the time, so each function is one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap
from longspec.kernels.pages import check_tables, place_of

_ROWS = 16

Levels = tuple[Tensor, Tensor, Tensor]
"""Tokens and parents, int64 [B, N], and scores, fp32 [B, N], of a tree that grows level by level."""


@launched
@triton.jit(do_not_specialize=["num_nodes", "depth", "tables_b"])
def _sees_kernel(
    parents, lengths, tables, sees, positions, entries, paths, num_nodes, depth, tables_b,
    PAGE: tl.constexpr, NODES: tl.constexpr, ROWS: tl.constexpr, PATHS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    b = tl.program_id(1).to(tl.int64)
    node, other = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, NODES)
    real = node < num_nodes
    parents += b * num_nodes
    here = node.to(tl.int64)
    found = other[None, :] == here[:, None]
    for _ in tl.range(0, depth):
        here = tl.load(parents + here, mask=real, other=0)
        found = found | (other[None, :] == here[:, None])
    place = (b * num_nodes + node)[:, None] * num_nodes + other[None, :]
    tl.store(sees + place, found.to(tl.int8), mask=real[:, None] & (other < num_nodes)[None, :])
    length, level = tl.load(lengths + b), tl.sum(found.to(tl.int64), 1) - 1
    tl.store(positions + b * num_nodes + node, length + level, mask=real)
    if PATHS:
        here = node.to(tl.int64)
        for _ in tl.range(0, depth + 1):
            at = (b * num_nodes + node) * (depth + 1) + level
            tl.store(paths + at, here, mask=real & (level >= 0))
            here = tl.load(parents + here, mask=real, other=0)
            level -= 1
    place = place_of(tables + b * tables_b, length + node, real, PAGE)
    tl.store(entries + b * num_nodes + node, place, mask=real)


def tree_sees(
    parents: Tensor, depth: int, lengths: Tensor, tables: Tensor, page: int, paths: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Which nodes each node sees (itself and its ancestors), bool [B, N, N]; its position in the text and its
    place in the pages of KV, int64 [B, N] each. `paths`, int64 [B, N, depth + 1], is filled with the nodes on
    the way from the root to each node.

    parents [B, N] describe a tree of at most `depth` levels below the root, after a prefix of lengths [B]:
    node n has entry lengths + n. tables are int32 [B, M] (`longspec.kernels.pages`).
    """
    check_tables(tables, page)
    B, N = parents.shape
    sees = torch.empty(B, N, N, dtype=torch.bool, device=parents.device)
    positions, entries = torch.empty(2, B, N, dtype=torch.int64, device=parents.device).unbind(0)
    _sees_kernel[(triton.cdiv(N, _ROWS), B)](
        parents.contiguous(), lengths, tables, sees.view(torch.int8), positions, entries,
        positions if paths is None else paths, N, depth, tables.stride(0),
        PAGE=page, NODES=max(_ROWS, triton.next_power_of_2(N)), ROWS=_ROWS, PATHS=paths is not None,
        **overlap(parents.device),
    )  # fmt: skip
    return sees, positions, entries


@launched
@triton.jit(do_not_specialize=["width", "window", "num_entries", "num_nodes", "text_b", "held_b"])
def _claim_kernel(
    text, num_new, lengths, held, newest, positions, entries, roots, parents, scores,
    width, window, num_entries, num_nodes, text_b, held_b, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    count, length = tl.load(num_new + b), tl.load(lengths + b)
    text += b * text_b
    tl.store(roots + b * num_nodes, tl.load(text + length))
    tl.store(parents + b * num_nodes, count * 0)
    tl.store(scores + b * num_nodes, 0.0)
    inside, wanted = i < width, i < count
    position = tl.maximum(length - i, 0)
    entry = tl.where(wanted, position % window, num_entries - 1)
    tl.store(newest + b * width + i, tl.load(text + position, mask=inside, other=0), mask=inside)
    tl.store(positions + b * width + i, position, mask=inside)
    tl.store(entries + b * width + i, entry, mask=inside)
    tl.store(held + b * held_b + entry, position, mask=wanted & inside)


def claim_newest(
    text: Tensor,
    num_new: Tensor,
    lengths: Tensor,
    held: Tensor,
    window: int,
    tree: Levels,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """A row's newest `width` tokens, from the root backwards, their positions in the text and their entries
    in the draft's ring, int64 [B, width] each.

    The root is text[b, lengths[b]], of int64 [B, S'] and [B]; it is written as the first node of the tree.
    The first num_new [B] tokens, at least 1, are new to the ring: `held` [B, entries], the position that each
    entry of the ring holds, is updated for them. The other tokens get the last entry, the dump entry.
    """
    (B, num_entries), device = held.shape, held.device
    newest, positions, entries = torch.empty(3, B, width, dtype=torch.int64, device=device).unbind(0)
    _claim_kernel[(B,)](
        text, num_new, lengths, held, newest, positions, entries, *tree,
        width, window, num_entries, tree[0].shape[1], text.stride(0), held.stride(0),
        WIDTH=triton.next_power_of_2(width), **overlap(device),
    )  # fmt: skip
    return newest, positions, entries


@launched
@triton.jit(do_not_specialize=["size", "capacity", "text_b", "tables_b"])
def _segment_kernel(
    starts, counts, slots, tables, text, tokens, positions, entries, size, capacity, text_b, tables_b,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    segment, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot, count = tl.load(slots + segment), tl.load(counts + segment)
    position, inside = tl.load(starts + segment) + i, i < size
    token = tl.load(text + slot * text_b + position, mask=inside & (i < count), other=0)
    tl.store(tokens + segment * size + i, token, mask=inside)
    tl.store(positions + segment * size + i, position, mask=inside)
    # Positions past the end of the table go to the dump page.
    place = place_of(tables + slot * tables_b, position, inside & (position < capacity), PAGE)
    tl.store(entries + segment * size + i, place, mask=inside)


def segment_places(
    starts: Tensor, counts: Tensor, slots: Tensor, tables: Tensor, text: Tensor, page: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For prefill in segments: the tokens of each segment, their positions in the text and their places in
    the pages of KV, int64 [n, size] each.

    Segment s has the `size` tokens of text[slots[s]] from starts[s] on; only the first counts[s] are real,
    the others are 0. starts, counts and slots are int64 [n]. The rope table must cover all positions.
    """
    check_tables(tables, page)
    (n,), device = starts.shape, text.device
    tokens, positions, entries = torch.empty(3, n, size, dtype=torch.int64, device=device).unbind(0)
    _segment_kernel[(n,)](
        starts, counts, slots, tables, text, tokens, positions, entries, size, tables.shape[1] * page,
        text.stride(0), tables.stride(0), PAGE=page, BLOCK=triton.next_power_of_2(size), **overlap(device),
    )  # fmt: skip
    return tokens, positions, entries


@launched
@triton.jit(do_not_specialize=["num_nodes", "num_kept"])
def _prune_kernel(
    tokens, parents, scores, places, out_tokens, out_parents, num_nodes, num_kept,
    NODES: tl.constexpr, ROWS: tl.constexpr, MAPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Without MAPS, find each node's place among the kept nodes; with MAPS, move tokens and parents there."""
    await_turn(OVERLAP)
    b = tl.program_id(1).to(tl.int64)
    node, other = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, NODES)
    real = node < num_nodes
    places += b * num_nodes
    if MAPS:
        place = tl.load(places + node, mask=real, other=-1)
        kept = place >= 0
        parent = tl.load(parents + b * num_nodes + node, mask=kept, other=0)
        tl.store(out_parents + b * num_kept + place, tl.load(places + parent, mask=kept), mask=kept)
        token = tl.load(tokens + b * num_nodes + node, mask=kept)
        tl.store(out_tokens + b * num_kept + place, token, mask=kept)
    else:
        scores += b * num_nodes
        theirs = tl.load(scores + other, mask=other < num_nodes, other=-float("inf"))
        # The number of better nodes; of equal ones the first is better.
        rank = tl.zeros([NODES], tl.int32)
        for i in tl.range(0, num_nodes):
            score = tl.load(scores + i)
            rank += ((score > theirs) | ((score == theirs) & (i < other))).to(tl.int32)
        stays = (rank < num_kept) & (other < num_nodes)
        before = tl.sum((stays[None, :] & (other[None, :] < node[:, None])).to(tl.int64), 1)
        ours = tl.sum((stays[None, :] & (other[None, :] == node[:, None])).to(tl.int32), 1) > 0
        tl.store(places + node, tl.where(ours, before, -1), mask=real)


def prune(tokens: Tensor, parents: Tensor, scores: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
    """The tokens and parents of a tree's best nodes, as `TokenTree.pruned`: [B, num_kept] each.

    tokens, parents and scores are [B, N]. Scores must not be nan.
    """
    B, N = tokens.shape
    places = torch.empty(B, N, dtype=torch.int64, device=tokens.device)
    kept_tokens, kept_parents = torch.empty(2, B, num_kept, dtype=torch.int64, device=tokens.device).unbind(0)
    for maps in (False, True):
        _prune_kernel[(triton.cdiv(N, _ROWS), B)](
            tokens, parents, scores, places, kept_tokens, kept_parents, N, num_kept,
            NODES=triton.next_power_of_2(N), ROWS=_ROWS, MAPS=maps, **overlap(tokens.device),
        )  # fmt: skip
    return kept_tokens, kept_parents
