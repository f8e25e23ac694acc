"""The copied branch by kernels against the plain code."""

from __future__ import annotations

import pytest
import torch

from longspec.decoding.copied import DOUBT, FADE, LEAST, MOST, Text, graft
from longspec.decoding.tree import TokenTree
from longspec.kernels.copied import graft_copied
from tests.kernels.test_fused import DEVICE
from tests.kernels.test_tree import random_levels


@pytest.mark.parametrize("lengths", [(0, 5, 60), (40, 3, 4500)])
@pytest.mark.parametrize(("shape", "num_copied"), [((3, 5, 4), 6), ((1,), 3), ((4, 16, 16, 16, 16), 12)])
def test_a_copied_branch_is_the_same(
    lengths: tuple[int, ...], shape: tuple[int, ...], num_copied: int
) -> None:
    B, N, copied = len(lengths), sum(shape) + 1, 0
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        text = Text.empty(B, max(lengths) + 20, DEVICE)
        text.tokens.copy_(torch.randint(2 + seed, text.tokens.shape, generator=generator))
        parents = random_levels(B, shape, seed)
        # Children of a node differ, as a draft's do.
        tokens = (parents[:, :, None] == parents[:, None]).tril(-1).sum(-1)
        scores = -torch.rand(B, N, generator=generator).cumsum(1).to(DEVICE)
        ends = torch.tensor(lengths, device=DEVICE)
        want, worth = graft(TokenTree(tokens, parents), scores, text, ends + 1, num_copied)
        room = tokens.new_full((B, num_copied), -7)
        found = (
            torch.cat((tokens, room), 1),
            torch.cat((parents, room), 1),
            torch.cat((scores, room.float()), 1),
        )
        graft_copied(found, N, text.tokens, text.best, ends, (LEAST, MOST, DOUBT, FADE))
        assert torch.equal(found[0], want.tokens)
        assert torch.equal(found[1], want.parents)
        torch.testing.assert_close(found[2], worth, rtol=1e-4, atol=1e-5)
        assert not text.best.any()
        copied += int((worth[:, N:] > -torch.inf).sum())
    assert copied
