"""A looked-up branch by kernels against the same in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from longspec.kernels.lookup import graft_lookup
from tests.kernels.paged import DEVICE
from tests.kernels.test_tree import random_levels

CHANCES = LEAST, MOST, DOUBT, FADE = 2, 8, 2.3, 0.45
Branch = list[tuple[int, int, float]]


def longest_run(text: list[int]) -> tuple[int, int]:
    """How long a run of tokens that ends the text stood before, and where what followed it begins; the
    longest, and of these the newest."""
    best = (0, 0)
    for place in range(1, len(text)):
        run = 0
        while run < min(MOST, place) and text[place - 1 - run] == text[-1 - run]:
            run += 1
        if run >= LEAST:
            best = max(best, (run, place))
    return best


def graft(tokens: list[int], parents: list[int], scores: list[float], text: list[int], num: int) -> Branch:
    """Raise scores of nodes that are there; the nodes to add: token, parent, score."""
    run, begin = longest_run(text)
    node, score, added = 0, 0.0, list[tuple[int, int, float]]()
    for step in range(num):
        if run == 0:
            added.append((tokens[0], 0, -math.inf))
            continue
        token = text[begin + step % (len(text) - begin)]
        score += math.log(1 - (FADE / run if step else DOUBT / run**2))
        child = [n for n in range(1, len(tokens)) if parents[n] == node and tokens[n] == token]
        if child:
            scores[child[0]] = max(scores[child[0]], score)
            added.append((tokens[0], 0, -math.inf))
            node = child[0]
        else:
            added.append((token, node, score))
            node = len(tokens) + step
    return added


@pytest.mark.parametrize("lengths", [(0, 5, 60), (40, 3, 4500)])
@pytest.mark.parametrize(("shape", "num"), [((), 5), ((3, 5, 4), 6), ((1,), 3), ((4, 16, 16, 16, 16), 12)])
def test_a_branch_that_is_looked_up(lengths: tuple[int, ...], shape: tuple[int, ...], num: int) -> None:
    B, N, looked_up = len(lengths), sum(shape) + 1, 0
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(2 + seed, (B + 1, max(lengths) + 30), generator=generator)
        text = text.to(DEVICE)[:B, : max(lengths) + 1]
        parents = random_levels(B, shape, seed)
        # Children of a node differ, as a draft's do.
        tokens = (parents[:, :, None] == parents[:, None]).tril(-1).sum(-1)
        scores = -torch.rand(B, N, generator=generator).cumsum(1).to(DEVICE)
        room, best = tokens.new_full((B, num), -7), torch.zeros(B, dtype=torch.int64, device=DEVICE)
        found = tuple(torch.cat((part, room.to(part.dtype)), 1) for part in (tokens, parents, scores))
        assert len(found) == 3
        graft_lookup(found, N, text, best, torch.tensor(lengths, device=DEVICE), CHANCES)
        assert not best.any()
        for row, length in enumerate(lengths):
            old = tokens[row].tolist(), parents[row].tolist(), scores[row].tolist()
            added = graft(*old, text[row, : length + 1].tolist(), num)
            expected = [part + list(more) for part, more in zip(old, zip(*added, strict=True), strict=True)]
            assert found[0][row].tolist() == expected[0]
            assert found[1][row].tolist() == expected[1]
            worth = torch.tensor(expected[2], device=DEVICE)
            torch.testing.assert_close(found[2][row], worth, rtol=1e-4, atol=1e-5)
            looked_up += sum(score > -math.inf for _, _, score in added)
    assert looked_up
