"""The kernels around a round against the plain code that they stand in for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspec.attention.torch_backend import TorchAttention
from longspec.cache import DraftCache, KVCache
from longspec.config import DraftConfig
from longspec.decoding.choose import Sampling
from longspec.decoding.device import Board, _settle, _settle_fused
from longspec.decoding.loop import DecodeState, start
from longspec.decoding.row import Row
from longspec.decoding.tree import TokenTree, ancestors
from longspec.kernels.embed import embed_level
from longspec.kernels.masked import Nodes, masked
from longspec.kernels.tree import claim_newest, prune, tree_sees
from tests.decoding.scripted import tiny_target
from tests.kernels.test_fused import DEVICE


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
    lengths = torch.tensor([0, 70], device=DEVICE)
    sees, positions, entries = tree_sees(parents, len(shape), lengths)
    assert torch.equal(sees, ancestors(parents))
    assert torch.equal(positions, lengths[:, None] + sees.sum(-1) - 1)
    assert torch.equal(entries, lengths[:, None] + torch.arange(parents.shape[1], device=DEVICE))


def test_a_level_attends_to_the_ring_and_to_its_ancestors() -> None:
    target, window, shape = tiny_target(2), 7, (3, 5, 4)
    config = target.config
    ring = DraftCache.empty(config, DraftConfig(window=window), 2, sum(shape) + 1, DEVICE, torch.float32)
    generator = torch.Generator().manual_seed(2)
    for part in (ring.keys, ring.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    lengths = torch.tensor([3, 40], device=DEVICE)
    ring.claim(lengths[:, None] - torch.arange(3, device=DEVICE), torch.ones(2, 3, device=DEVICE) > 0)
    ring.positions[1, 5] = 33  # one that has just left the window
    whole = random_levels(2, shape, 1)
    table = torch.randn(50, 16, generator=generator).to(DEVICE)
    first = 0
    for depth, width in enumerate((1, *shape)):
        tokens = torch.randint(50, (2, width), generator=generator).to(DEVICE)
        level = (lengths, depth, window + first)
        stream, _, positions, entries = embed_level(tokens, table, None, None, level)
        assert torch.equal(stream.x, table[tokens])
        assert torch.equal(positions, (lengths + depth)[:, None].expand(2, width))
        assert torch.equal(entries, ring.node_entries(first, width))
        q = torch.randn(2, width, config.num_heads, config.head_dim, generator=generator).to(DEVICE)
        seen = ancestors(whole[:, : first + width])[:, first:].clone()
        seen[:, :, 0] = False
        sees = ring.sees(positions, seen if depth else None)
        nodes = Nodes(ring.positions, window, lengths, whole, first, depth)
        out = masked(q, ring.keys, ring.values, nodes)[0]
        exact = TorchAttention().masked(q, ring.keys, ring.values, sees)[0]
        torch.testing.assert_close(out, exact)
        torch.testing.assert_close(masked(q, ring.keys, ring.values, sees)[0], exact)
        first += width


def test_newest_tokens_enter_the_ring() -> None:
    target = tiny_target(2)
    one, other = (
        DraftCache.empty(target.config, DraftConfig(window=6), 3, 4, DEVICE, torch.float32) for _ in range(2)
    )
    for counts, lengths in (((1, 3, 4), (0, 9, 20)), ((2, 1, 4), (2, 10, 24))):
        num_new, ends = (torch.tensor(values, device=DEVICE) for values in (counts, lengths))
        offsets = torch.arange(4, device=DEVICE)
        positions = ((ends + 1 - num_new)[:, None] + offsets).clamp(min=0)
        entries = one.claim(positions, offsets < num_new[:, None])
        tokens = torch.randint(100, (3, 4), generator=torch.Generator().manual_seed(counts[0])).to(DEVICE)
        tree = (tokens.new_full((3, 7), -1), tokens.new_full((3, 7), -1), torch.ones(3, 7, device=DEVICE))
        found = claim_newest(tokens, num_new, ends, other.positions, 6, tree)
        assert torch.equal(tree[0][:, 0], tokens.gather(1, num_new[:, None] - 1)[:, 0])
        assert [part[:, 0].tolist() for part in tree[1:]] == [[0] * 3] * 2
        assert (tree[0][:, 1:] == -1).all()
        for new, count in enumerate(counts):  # the root first, then backwards
            for part, true in zip(found, (tokens, positions, entries), strict=True):
                assert part[new, :count].tolist() == true[new, :count].tolist()[::-1]
            assert (found[2][new, count:] == other.positions.shape[1] - 1).all()
        assert torch.equal(one.positions, other.positions)


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


def decode_state(B: int, width: int) -> tuple[DecodeState, Board]:
    target = tiny_target(2).to(DEVICE)
    rows = [Row([1] * (5 + row), row, 6, frozenset({3, 11})) for row in range(B)]
    cache = KVCache.empty(target.config, B, 64, DEVICE, torch.float32)
    cache.keys.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    cache.values.copy_(cache.keys)
    cache.lengths.copy_(torch.arange(B) + 4)
    state = start(target, cache, rows, Sampling())
    state.emitted = torch.zeros(B, width, dtype=torch.int64, device=DEVICE)
    board = Board.of(state, width)
    board.running[2] = False
    return state, board


@pytest.mark.parametrize("shape", [(), (1, 1, 1), (3, 5, 4)])
def test_a_round_is_settled_alike(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(4)
    parents = random_levels(6, shape, 5)
    for _ in range(8):  # a vocabulary so small that some paths are long, some ended, some repeated
        tokens, choices = (torch.randint(4, parents.shape, generator=generator).to(DEVICE) for _ in range(2))
        hidden = torch.randn(*parents.shape, tiny_target(2).config.hidden_size, generator=generator)
        tree, found = TokenTree(tokens, parents), []
        for settle in (_settle, _settle_fused):
            state, board = decode_state(6, len(shape) + 1)
            settle(state, tree, hidden.to(DEVICE), choices, board)
            # What stands behind a row's own tokens, or behind its prefix, is nobody's.
            said = torch.arange(len(shape) + 1, device=DEVICE) < state.num_emitted[:, None]
            prefix = torch.arange(64, device=DEVICE) < state.cache.lengths[:, None]
            kept = state.cache.keys * prefix[None, :, None, :, None]
            told = (board.report[:, 0], board.report[:, 1:] * said, board.running)
            left = (state.num_emitted, state.emitted * said, state.feature, state.cache.lengths, kept)
            found.append((*told, *left))
        for plain, fused in zip(*found, strict=True):
            assert torch.equal(plain, fused)
