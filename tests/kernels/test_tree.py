"""The kernels around a round against the plain code that they stand in for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspec.decoding.tree import TokenTree, ancestors
from longspec.kernels.embed import embed_level
from longspec.kernels.masked import Nodes, masked
from longspec.kernels.tree import claim_newest, prune, segment_places, tree_sees
from tests.kernels.paged import DEVICE, exact, places, random_tables


def random_levels(B: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Parents [B, N] of trees whose levels have these many nodes."""
    generator, levels, first = torch.Generator().manual_seed(seed), [torch.zeros(B, 1, dtype=torch.int64)], 0
    for width in shape:
        above = levels[-1].shape[1]
        levels.append(first + torch.randint(above, (B, width), generator=generator))
        first += above
    return torch.cat(levels, 1).to(DEVICE)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (4, 16, 16, 16, 16)])
def test_who_sees_whom(shape: tuple[int, ...]) -> None:
    parents = random_levels(2, shape, 0)
    N, page = parents.shape[1], 16
    lengths = torch.tensor([0, 70], device=DEVICE)
    tables, _ = random_tables([N, 70 + N], page, torch.Generator().manual_seed(1))
    sees, positions, entries = tree_sees(parents, len(shape), lengths, tables, page)
    assert torch.equal(sees, ancestors(parents))
    assert torch.equal(positions, lengths[:, None] + sees.sum(-1) - 1)
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(entries[row], places(tables, row, length + N, page)[length:])


def test_segments_take_their_tokens_from_the_text() -> None:
    page, size = 16, 24
    tables, _ = random_tables([60, 100, 20], page, torch.Generator().manual_seed(1))
    text = torch.randint(1, 100, (4, 200), generator=torch.Generator().manual_seed(2)).to(DEVICE)[:3, :150]
    starts, counts, slots = torch.tensor([[24, 0, 96], [24, 20, 3], [0, 2, 1]], device=DEVICE).unbind(0)
    tokens, positions, entries = segment_places(starts, counts, slots, tables, text, page, size)
    assert torch.equal(positions, starts[:, None] + torch.arange(size, device=DEVICE))
    for segment, (start, count, slot) in enumerate(torch.stack((starts, counts, slots), 1).tolist()):
        assert tokens[segment].tolist() == text[slot, start : start + count].tolist() + [0] * (size - count)
        # Behind the table there is the dump page.
        inside = min(size, tables.shape[1] * page - start)
        assert torch.equal(entries[segment, :inside], places(tables, slot, start + inside, page)[start:])
        assert (entries[segment, inside:] < page).all()


def test_a_level_attends_to_the_ring_and_to_its_ancestors() -> None:
    """Of a ring and a tree that have room for more rows."""
    window, shape, B, H, K, D = 7, (3, 5, 4), 2, 6, 2, 16
    num_entries = window + sum(shape) + 2
    generator = torch.Generator().manual_seed(2)
    keys, values = torch.randn(2, B + 1, K, num_entries, D, generator=generator).to(DEVICE)[:, :B].unbind(0)
    lengths = torch.tensor([3, 40], device=DEVICE)
    held = torch.full((B, num_entries + 3), -1, device=DEVICE)[:, :num_entries]
    for newest in (lengths, lengths - 1, lengths - 2):
        held[torch.arange(B), newest % window] = newest
    held[1, 5] = 33  # one that has just left the window
    whole = torch.cat((random_levels(B, shape, 1), torch.zeros(B, 4, dtype=torch.int64, device=DEVICE)), 1)
    whole = whole[:, : sum(shape) + 1]
    table = torch.randn(50, 16, generator=generator).to(DEVICE)
    first = 0
    for depth, width in enumerate((1, *shape)):
        tokens = torch.randint(50, (B, width), generator=generator).to(DEVICE)
        level = (lengths, depth, window + first)
        stream, _, positions, entries = embed_level(tokens, table, None, None, level)
        assert torch.equal(stream.x, table[tokens])
        assert torch.equal(positions, (lengths + depth)[:, None].expand(B, width))
        assert torch.equal(entries, (window + first + torch.arange(width, device=DEVICE)).expand(B, width))
        back = positions[:, :, None] - held[:, None, :window]
        sees = torch.zeros(B, width, num_entries, dtype=torch.bool, device=DEVICE)
        sees[:, :, :window] = (held[:, None, :window] >= 0) & (back >= 0) & (back < window)
        sees[:, :, window : window + first + width] = ancestors(whole[:, : first + width])[:, first:]
        sees[:, :, window] = False  # the root stands in the ring
        q = torch.randn(B, width, H, D, generator=generator).to(DEVICE)
        nodes = Nodes(held, window, lengths, whole, first, depth)
        out, lse = masked(q, keys, values, nodes)
        for row in range(B):
            true_out, true_lse = exact(q[row], keys[row], values[row], sees[row])
            torch.testing.assert_close(out[row].double(), true_out, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(lse[row].double(), true_lse, atol=1e-4, rtol=1e-3)
        first += width


def test_newest_tokens_enter_the_ring() -> None:
    window, num_entries, width = 6, 11, 4
    held, expected = (torch.full((3, num_entries + 2), -1, device=DEVICE)[:, :num_entries] for _ in range(2))
    text = torch.randint(100, (4, 40), generator=torch.Generator().manual_seed(0)).to(DEVICE)[:3, :30]
    for counts, lengths in (((1, 3, 4), (0, 9, 20)), ((2, 1, 4), (2, 10, 24))):
        num_new, ends = (torch.tensor(values, device=DEVICE) for values in (counts, lengths))
        tree = (text.new_full((3, 7), -1), text.new_full((3, 7), -1), torch.ones(3, 7, device=DEVICE))
        newest, positions, entries = claim_newest(text, num_new, ends, held, window, tree, width)
        assert torch.equal(tree[0][:, 0], text.gather(1, ends[:, None])[:, 0])
        assert [part[:, 0].tolist() for part in tree[1:]] == [[0] * 3] * 2
        assert (tree[0][:, 1:] == -1).all()
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            backwards = list(range(length, length - count, -1))
            assert positions[row, :count].tolist() == backwards
            assert newest[row, :count].tolist() == text[row, backwards].tolist()
            assert entries[row].tolist() == [p % window for p in backwards] + [10] * (width - count)
            expected[row, [p % window for p in backwards]] = torch.tensor(backwards, device=DEVICE)
        assert torch.equal(held, expected)


@pytest.mark.parametrize("kept", [1, 9, 30, 52])
def test_the_best_nodes_are_kept(kept: int) -> None:
    parents = random_levels(3, (4, 16, 16, 16), 2)
    drop = torch.randint(3, parents.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE).float()
    drop[:, 0] = 0
    drop[2, 20:] = torch.inf  # a draft that proposes nonsense
    scores = -(ancestors(parents) * drop[:, None]).nan_to_num(0.0, posinf=torch.inf).sum(-1)
    tree = TokenTree(torch.arange(parents.numel(), device=DEVICE).view_as(parents), parents)
    true = tree.pruned(scores, kept)
    tokens, above = prune(tree.tokens, parents, scores, kept)
    assert torch.equal(tokens, true.tokens)
    assert torch.equal(above, true.parents)
