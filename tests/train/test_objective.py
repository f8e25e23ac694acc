"""The objective against a plain reference, and against what decoding computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from longspec.config import DraftConfig
from longspec.data.collate import collate
from longspec.data.shards import Packed, Role
from longspec.decoding import drafting
from longspec.decoding.methods import Seq
from longspec.decoding.tree import TokenTree
from longspec.engine.make import make_engine
from longspec.engine.sequence import Sequence
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.target import Transformer
from longspec.train.compiled import compile_layers
from longspec.train.evaluate import Continuation, chain_acceptance
from longspec.train.layout import Draws, head_rows, lay_out
from longspec.train.losses import LossShares, head_loss
from longspec.train.objective import Objective
from tests.decoding.scripted import tiny_target
from tests.train.reference import document_logits, reference_loss

CONFIGS = {
    "published": DraftConfig(window=8, max_lag=4),
    "ours": DraftConfig(
        window=8,
        max_lag=4,
        cross_layers=(0, 1, -1),
        use_feature=True,
        qkv_bias=False,
        final_norm=True,
        intermediate_size=48,
        lag_gate=True,
    ),
    "small vocabulary": DraftConfig(window=8, max_lag=4, use_feature=True, draft_vocab=60),
}

PARENTS = replace(CONFIGS["ours"], use_parent=True)


def make(config: DraftConfig) -> tuple[Transformer, GlideDraft]:
    target = tiny_target(num_layers=3, vocab_size=97)
    draft = GlideDraft(target.config, config)
    draft.initialise(torch.Generator().manual_seed(1), std=0.2)
    if draft.vocab_ids is not None:
        chosen = torch.randperm(target.config.vocab_size, generator=torch.Generator().manual_seed(2))
        draft.vocab_ids.copy_(chosen[: config.draft_vocab].sort().values)
    return target, draft


def packed(vocab_size: int, starts: list[int], length: int, seed: int) -> Packed:
    chance = np.random.default_rng(seed)
    roles = chance.choice([Role.PROMPT, Role.TEXT], length).astype(np.uint8)
    roles[starts[-1] :] = Role.PAD
    return Packed(chance.integers(0, vocab_size, length), roles, np.array(starts, np.int32))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shares", [LossShares(), LossShares(0.3), LossShares(1.0), LossShares(0.1, 0.6)])
def test_loss_and_gradients_of_a_batch_equal_the_plain_reference(name: str, shares: LossShares) -> None:
    target, draft = make(CONFIGS[name])
    size = target.config.vocab_size
    rows = [packed(size, starts, 40, 5) for starts in ([0, 36], [0, 3, 17, 30], [0, 11, 12, 39])]
    batch = collate(rows, "long", True)
    lags, offsets = [2, 1, 4], [0, 100, 9]
    layout = lay_out(batch, [lags], offsets, 4, head_rows(draft.vocab_ids, size), torch.device("cpu"))
    expected, count = reference_loss(target, draft, batch, lags, offsets, 4, shares)
    expected.backward()
    gradients = {name: weight.grad for name, weight in draft.named_parameters()}
    draft.zero_grad()
    # What the target read for another lag is as good.
    others = lay_out(batch, [[1, 3, 2]], offsets, 4, head_rows(draft.vocab_ids, size), torch.device("cpu"))
    objective = Objective(target, draft, shares)
    outcome = objective(layout, objective.read(others))
    outcome.loss.backward()
    assert len(layout.queries) == layout.levels[0].num_counted == count > 10
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-5, atol=1e-5)
    for weight_name, weight in draft.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[weight_name], rtol=1e-4, atol=1e-5, msg=weight_name)


def test_lags_that_are_learnt_together_equal_the_plain_reference() -> None:
    target, draft = make(PARENTS)
    size, shares = target.config.vocab_size, LossShares(0.6)
    rows = [packed(size, starts, 40, 5) for starts in ([0, 36], [0, 3, 17, 30], [0, 11, 12, 39])]
    batch, offsets = collate(rows, "long", True), [0, 100, 9]
    ids, device = head_rows(draft.vocab_ids, size), torch.device("cpu")
    layout = lay_out(batch, [[lag] * 3 for lag in range(1, 5)], offsets, 4, ids, device)
    expected = sum(
        0.7 ** (lag - 1) * reference_loss(target, draft, batch, [lag] * 3, offsets, 4, shares)[0]
        for lag in range(1, 5)
    )
    assert isinstance(expected, Tensor)
    expected.backward()
    gradients = {name: weight.grad for name, weight in draft.named_parameters()}
    for draft.recompute_levels in (False, True):
        draft.zero_grad()
        outcome = Objective(target, draft, shares, lag_decay=0.7)(layout)
        outcome.loss.backward()
        torch.testing.assert_close(outcome.loss, expected, rtol=1e-5, atol=1e-5)
        for name, weight in draft.named_parameters():
            torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-4, atol=1e-5, msg=name)
        assert set(outcome.probes[:, 2].tolist()) == {1, 2, 3, 4}


class Recording(DraftHead):
    """Keeps the draft's scores of every depth."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen.append(super().forward(hidden))
        return self.seen[-1]


@pytest.mark.parametrize("config", [*CONFIGS.values(), PARENTS], ids=[*CONFIGS, "parents"])
@pytest.mark.parametrize("prompt_length", [4, 21])
def test_training_scores_equal_those_of_decoding_for_the_same_tokens_and_lag(
    config: DraftConfig, prompt_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = make(config)
    prompt = np.random.default_rng(3).integers(0, target.config.vocab_size, prompt_length).tolist()
    chains, propose = [], drafting.propose

    def recorded(*arguments: Any) -> TokenTree:
        tree = propose(*arguments)
        chains.append(tree.tokens[0].tolist())
        return tree

    monkeypatch.setattr(drafting, "propose", recorded)
    recording = Recording(target, draft.vocab_ids)
    engine = make_engine(target, draft, recording, max_rows=1, max_length=64)
    list(engine.run_each([Sequence(prompt, 8, method=Seq(gamma=4))]))
    tokens = prompt + chains[0]
    whole = Packed(np.array(tokens), np.full(len(tokens), Role.TEXT, np.uint8), np.zeros(1, np.int32))
    rows = head_rows(draft.vocab_ids, target.config.vocab_size)
    head = DraftHead(target, draft.vocab_ids)
    batch, objective = collate([whole], "base", False), Objective(target, draft)
    layout = lay_out(batch, [[lag] for lag in range(1, 5)], [0], 4, rows, torch.device("cpu"))
    with torch.no_grad():
        hidden = objective.draft_hidden(layout, objective.read(layout))
    for depth, scores in enumerate(recording.seen[:4]):
        (at,) = torch.nonzero(layout.asked == len(prompt) + depth)
        trained = head(hidden[depth])[at[0]]
        torch.testing.assert_close(trained, scores[0, -1], rtol=1e-4, atol=1e-4)


def test_the_draft_is_asked_only_where_something_is_learnt() -> None:
    roles = np.full(600, Role.PROMPT, np.uint8)
    for begin, end in ((100, 130), (150, 160), (400, 420), (500, 501)):
        roles[begin:end] = Role.TEXT
    one = Packed(np.arange(600) % 97, roles, np.array([0, 405], np.int32))
    rows, device = head_rows(None, 97), torch.device("cpu")
    layout = lay_out(collate([one], "long", True), [[1], [2], [3]], [0], 4, rows, device)
    # Two parents come before each query, a short gap is filled, and 405 begins another document.
    spans = ((97, 159), (397, 404), (405, 419), (497, 500))
    assert layout.asked.tolist() == [place for begin, end in spans for place in range(begin, end)]
    assert layout.levels[0].key_pieces.bounds == [(0, 158), (158, 561), (561, 562), (562, 575), (575, 669)]
    assert layout.levels[0].sees.sum() == len(layout.asked) - 1
    short = Packed(np.arange(9), roles[98:107], np.zeros(1, np.int32))
    assert lay_out(collate([short], "long", True), [[1]], [0], 4, rows, device).asked.tolist() == [
        *range(1, 8)
    ]


def test_a_long_window_needs_no_square_mask_and_is_right() -> None:
    """Beyond several windows in one document, in blocks, against the explicit mask."""
    target, draft = make(DraftConfig(window=7, max_lag=3))
    one = packed(target.config.vocab_size, [0, 60], 61, 9)
    layout = lay_out(collate([one], "base", False), [[3]], [0], 4, head_rows(None, 97), torch.device("cpu"))
    with torch.no_grad():
        objective = Objective(target, draft)
        (hidden,) = objective.draft_hidden(layout, objective.read(layout))
        expected, _ = document_logits(target, draft, layout.tokens[0, :60], list(range(60)), 3)
    assert layout.asked.tolist() == list(range(3, 59))
    torch.testing.assert_close(target.logits(hidden), expected[3:59], rtol=1e-4, atol=1e-4)


def test_measuring_texts_of_many_lengths_compiles_nothing() -> None:
    target, draft = make(PARENTS)
    objective = Objective(target, draft, chunk=compile_layers(target, draft))
    texts = [Continuation(list(range(9 + n)), list(range(20))) for n in range(3)]
    counters.clear()
    found = chain_acceptance(objective, texts, 4)
    assert found == chain_acceptance(Objective(*make(PARENTS)), texts, 4)
    assert not counters["stats"]


def test_chunks_change_neither_loss_nor_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = [torch.randn(300, 16, generator=generator, requires_grad=True) for _ in range(2)]
    weights = torch.rand(2, 300, generator=generator).round(decimals=1)
    teacher, head = torch.randn(300, 16, generator=generator), torch.randn(50, 16, generator=generator)
    labels = torch.randint(50, (300,), generator=generator)
    for shares in (LossShares(), LossShares(0.5), LossShares(0.3, 0.2), LossShares(0.0, 1.0)):
        log_q, log_p = (torch.stack(hidden) @ head.T).log_softmax(-1), (teacher @ head.T).log_softmax(-1)
        hard = -log_q.gather(2, labels[None, :, None].expand(2, -1, -1))[..., 0]
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
        overlap = -torch.minimum(log_p.exp(), log_q.exp()).sum(-1).log()
        parts = (1 - sum(shares)) * hard + shares.soft * divergence + shares.overlap * overlap
        plain = (parts * weights).sum()
        expected = torch.autograd.grad(plain * 3, hidden)
        monkeypatch.setattr("longspec.train.losses.chunk_rows", lambda *_: 64)
        loss = head_loss(hidden, head, labels, weights, teacher, shares)
        found = torch.autograd.grad(loss * 3, hidden)
        torch.testing.assert_close(loss, plain)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_lags_and_offsets_are_drawn_by_sample_and_cover_their_range() -> None:
    draws = Draws(max_lag=5, window=16, max_offset=100)
    drawn = [draws.lags_and_offset(7, sample) for sample in range(2000)]
    assert drawn == [draws.lags_and_offset(7, sample) for sample in range(2000)]
    assert {lags for lags, _ in drawn} == {(1,), (2,), (3,), (4,), (5,)}
    offsets = [offset for _, offset in drawn]
    assert min(offset for offset in offsets if offset) >= 16
    assert 95 <= max(offsets) <= 100
    assert 0.1 < np.mean(np.equal(offsets, 0)) < 0.2
    assert {offset for _, offset in (Draws(5, 16).lags_and_offset(7, n) for n in range(50))} == {0}
    often = [replace(draws, lag_decay=0.5).lags_and_offset(7, sample)[0][0] for sample in range(6200)]
    counts = [often.count(lag) / 200 for lag in range(1, 6)]
    assert counts == pytest.approx([16, 8, 4, 2, 1], rel=0.15)
    several = replace(draws, num_lags=2)
    twice = [several.lags_and_offset(7, sample) for sample in range(2000)]
    assert [(lags[:1], offset) for lags, offset in twice] == drawn
    assert {lags for lags, _ in twice} == {(1, 3), (2, 4), (3, 5), (4, 1), (5, 2)}
