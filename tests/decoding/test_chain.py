"""The short way to draft a chain proposes what the tree's way proposes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longspec.config import DraftConfig
from longspec.decoding.accept import accept_coupled
from longspec.decoding.choose import Sampling
from longspec.decoding.loop import DecodeState, decode, start
from longspec.decoding.methods.chain import Chain
from longspec.decoding.methods.glide import Glide
from longspec.decoding.methods.vanilla import Vanilla
from longspec.decoding.row import Row
from longspec.decoding.tree import TokenTree
from longspec.models.draft import DraftHead, GlideDraft
from tests.decoding.scripted import tiny_target

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7], [8] * 30]


class Recorded:
    """A method whose proposals are kept."""

    def __init__(self, method: Glide) -> None:
        self._method, self.proposed = method, list[list[list[int]]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def propose(self, state: DecodeState) -> TokenTree:
        tree = self._method.propose(state)
        self.proposed.append(tree.tokens.tolist())
        return tree


@pytest.mark.parametrize(
    ("window", "max_nodes", "temperature"), [(6, None, 0.0), (9, None, 0.9), (9, 3, 0.0), (64, 4, 0.9)]
)
def test_proposes_what_a_tree_one_node_wide_does(
    window: int, max_nodes: int | None, temperature: float
) -> None:
    target, sampling = tiny_target(3, vocab_size=10), Sampling(temperature)
    config = DraftConfig(
        window=window,
        cross_layers=(0, 1),
        use_feature=True,
        final_norm=True,
        draft_vocab=4,
        max_lag=8,
        lag_gate=True,
    )
    draft = GlideDraft(target.config, config)
    draft.initialise(torch.Generator().manual_seed(1), std=0.4)
    draft.requires_grad_(False)
    head = DraftHead(target, draft.vocab_ids)
    found = []
    for method in (
        Recorded(Chain(draft, head, 5, max_nodes)),
        Recorded(Glide(draft, head, (1,) * 5, max_nodes, draws=False, name="seq")),
        Vanilla(),
    ):
        rows = [Row(prompt, index, 40 - 9 * index) for index, prompt in enumerate(PROMPTS)]
        state = start(target, target.new_cache(3, 90), rows, sampling)
        for _ in decode(state, method, accept_coupled):
            pass
        found.append((method, rows))
    (chain, ours), (tree, theirs), (_, expected) = found
    assert [row.tokens for row in ours] == [row.tokens for row in expected]
    if temperature:  # greedy, so small a target soon says one thing only, and the draft another
        assert sum(sum(row.accepted_by_depth[1:]) for row in ours) > 2, "or the ring never takes several"
    assert [row.depths for row in ours] == [row.depths for row in theirs]
    assert isinstance(chain, Recorded)
    assert isinstance(tree, Recorded)
    assert chain.proposed == tree.proposed
