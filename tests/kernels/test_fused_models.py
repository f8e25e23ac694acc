"""Target and draft by fused kernels compute what the plain modules compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longspec.attention import choose_backend
from longspec.config import DraftConfig
from longspec.data.writer import Job, Writer
from longspec.decoding.accept import accept_coupled
from longspec.decoding.choose import Sampling
from longspec.decoding.device import RoundStore
from longspec.decoding.loop import decode, start
from longspec.decoding.methods.glide import Glide
from longspec.decoding.row import Row
from longspec.kernels import linear
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.target import Transformer
from tests.decoding.scripted import tiny_target

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "qkv_bias": False},
    "qwen2": {},
    "qwen3": {"family": "qwen3", "qkv_bias": False, "qk_norm": True},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("small", "ffn"), [(0, 24), (400, 24), (1100, 80), (linear._SMALL, 24)])
def test_the_target(family: str, small: int, ffn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # What counts as small decides who multiplies: a library, our kernels, or either by turns.
    monkeypatch.setattr(linear, "_SMALL", small)
    shape = {"vocab_size": 40, "num_layers": 3, "intermediate_size": ffn, **FAMILIES[family]}
    target = tiny_target(3, **shape).to(DEVICE)
    tokens = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=DEVICE)
    found = []
    for backend in ("torch", "triton"):
        target.attention = choose_backend(backend)
        cache = target.new_cache(2, 32)
        with torch.inference_mode():
            results = [target(tokens, cache)]
            cache.advance(torch.tensor([5, 3], device=DEVICE))
            results.append(target(tokens[:, :3], cache, tree))
            cache.commit(torch.tensor([[0, 2], [0, 1]], device=DEVICE), torch.tensor([2, 2], device=DEVICE))
            results.append(target(tokens[:, :1], cache))
        found.append(results)
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(plain, fused, rtol=1e-4, atol=1e-5)


def answers(
    target: Transformer, draft: GlideDraft, sampling: Sampling, store: RoundStore | None
) -> list[Row]:
    method = Glide(draft, DraftHead(target, draft.vocab_ids), (3, 4), 6, draws=False, name="tree")
    rows = [Row([3, 1, 4, 1, 5], 1, 6), Row([2, 7], 2, 4)]
    state = start(target, target.new_cache(2, 40), rows, sampling)
    for _ in decode(state, method, accept_coupled, rounds=store):
        pass
    return rows


@pytest.mark.parametrize(
    ("sampling", "ours"), [(Sampling(), False), (Sampling(0.8, top_p=0.9), True)], ids=["greedy", "sampled"]
)
def test_a_draft_proposes_the_same(sampling: Sampling, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(3, vocab_size=40).to(DEVICE)
    config = DraftConfig(
        window=6,
        cross_layers=(0, 1),
        use_feature=True,
        final_norm=True,
        qkv_bias=False,
        intermediate_size=96,
        lag_gate=True,
    )
    # Layers that do not stand evenly, and a vocabulary of its own.
    other = DraftConfig(window=6, cross_layers=(1, 0), draft_vocab=20)
    draft = GlideDraft(target.config, config if ours else other)
    if draft.vocab_ids is not None:
        draft.vocab_ids.copy_(torch.arange(1, 40, 2))
    draft.initialise(torch.Generator().manual_seed(1), std=0.3)
    draft.requires_grad_(False).to(DEVICE)
    target.attention = choose_backend("torch")
    plain = answers(target, draft, sampling, None)
    target.attention = choose_backend("triton")
    for store, small in ((RoundStore(), linear._SMALL), (None, 0)):
        monkeypatch.setattr(linear, "_SMALL", small)  # with 0, a library multiplies
        fused = answers(target, draft, sampling, store)
        assert [row.tokens for row in fused] == [row.tokens for row in plain]
        assert [row.depths for row in fused] == [row.depths for row in plain]


def test_the_writer() -> None:
    target = tiny_target(3, vocab_size=40).to(DEVICE)
    jobs = [Job(i, [1, 2, i], 4 + i, i / 4, i) for i in range(5)]
    plain, fused = (
        {done.job.key: done.tokens for done in Writer(target, 3, 16, [7], fused=flag).write(jobs)}
        for flag in (False, True)
    )
    assert plain == fused
