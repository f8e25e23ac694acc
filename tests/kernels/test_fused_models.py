"""Target and draft by fused kernels compute what the plain modules compute, and say the same words."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from longspec.attention import choose_backend
from longspec.cache import Pages
from longspec.decoding.methods import VANILLA, Auto, Lookup, MagicDec, Seq, Tree
from longspec.decoding.sampling import AcceptanceRule, Sampling
from longspec.engine.sequence import Sequence
from longspec.kernels import products
from tests.decoding.scripted import pass_over, tiny_draft, tiny_engine, tiny_target

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "qkv_bias": False},
    "qwen2": {},
    "qwen3": {"family": "qwen3", "qkv_bias": False, "qk_norm": True},
}


@pytest.mark.parametrize(
    ("family", "small", "ffn"),
    [
        *(("qwen2", *sizes) for sizes in ((0, 24), (400, 24), (1100, 80), (products._SMALL, 24))),
        ("llama", 400, 24),
        ("qwen3", 400, 24),
        ("qwen3", products._SMALL, 24),
    ],
)
def test_the_target(family: str, small: int, ffn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # What counts as small decides who multiplies: a library, our kernels, or either by turns.
    monkeypatch.setattr(products, "_SMALL", small)
    shape = {"vocab_size": 40, "num_layers": 3, "intermediate_size": ffn, **FAMILIES[family]}
    target = tiny_target(3, **shape).to(DEVICE)
    tokens = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]] * 2, dtype=torch.bool, device=DEVICE)
    tables = torch.tensor([[3, 1], [4, 2]], dtype=torch.int32, device=DEVICE)
    found = []
    for backend in ("torch", "triton"):
        target.attention = choose_backend(backend)
        pages = Pages.empty(target.config, 4, 16, DEVICE, torch.float32)

        def over(
            lengths: list[int], tokens: torch.Tensor, tree: torch.Tensor | None = None, pages: Pages = pages
        ) -> torch.Tensor:
            at = torch.tensor(lengths, device=DEVICE)
            return pass_over(
                target, pages, tables, at, tokens, tree, target.attention.can_fuse(tokens.float(), 8)
            )

        with torch.inference_mode():
            results = [over([0, 0], tokens), over([15, 3], tokens[:, :3], tree)]
            path, kept = torch.tensor([[0, 2], [0, 1]], device=DEVICE), torch.tensor([2, 2], device=DEVICE)
            pages.commit(tables, torch.tensor([15, 3], device=DEVICE), path, kept)
            results.append(over([17, 5], tokens[:, :1]))
        found.append(results)
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(plain, fused, rtol=1e-4, atol=1e-5)


METHODS = {
    "vanilla": VANILLA,
    "seq": Seq(gamma=2),
    "tree": Tree(tree_shape=(2, 3), max_nodes=5, num_lookup=2),
    "magicdec": MagicDec(gamma=2, sinks=2, window=6),
    "lookup": Lookup(gamma=2),
    "auto": Auto(max_nodes=2),
    "drawn": Tree(tree_shape=(2, 2)),
}
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(0.8, top_p=0.9, repetition_penalty=1.2)}


def answers(backend: str, name: str, sampling: Sampling, config: dict[str, Any]) -> list[Sequence]:
    """By an engine with that backend: two rows, one of which comes later to a part of the other's pages."""
    target = tiny_target(3, vocab_size=40).to(DEVICE)
    target.attention = choose_backend(backend)
    draft = tiny_draft(target, window=6, max_lag=3, **config)
    if draft.vocab_ids is not None:
        draft.vocab_ids.copy_(torch.arange(1, 40, 2))
    engine = tiny_engine(target, draft, max_length=48, max_rows=2, num_pages=12)
    assert engine.models.fused == (backend == "triton")
    prompt = [3, 1, 4, 1, 5] * 4
    rule: AcceptanceRule = "rejection" if name == "drawn" else "coupled"
    asked = [
        Sequence(prompt[: 17 + 3 * row], 6 - row, sampling, row, method=METHODS[name], acceptance=rule)
        for row in range(2)
    ]
    engine.run(asked)
    return asked


# Layers that do not stand evenly, and a vocabulary of its own; and everything that a draft may have.
OTHER = {
    "cross_layers": (1, 0),
    "draft_vocab": 20,
    "use_feature": False,
    "lag_gate": False,
    "use_parent": False,
}
OURS = {"cross_layers": (0, 1), "final_norm": True, "qkv_bias": False, "intermediate_size": 96}


# Seconds each in the interpreter, so that every change is held against these alone.
QUICK = [
    ("vanilla", "sampled"),
    ("seq", "greedy"),
    ("tree", "sampled"),
    ("magicdec", "sampled"),
    ("lookup", "greedy"),
]


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.full)
        for pair in itertools.product(METHODS, SAMPLINGS)
    ],
)
def test_an_engine_says_the_same_words(method: str, sampling: str) -> None:
    # On a CPU the words of the text join a draft's own vocabulary, which changes what is drawn from it.
    config = OURS if sampling == "greedy" or method == "drawn" else OTHER
    plain, fused = (answers(one, method, SAMPLINGS[sampling], config) for one in ("torch", "triton"))
    assert [one.tokens for one in fused] == [one.tokens for one in plain]
    if method != "lookup":  # which proposes nothing by the host where no row has a match
        assert [one.depths for one in fused] == [one.depths for one in plain]
    assert [one.num_shared for one in fused] == [one.num_shared for one in plain] == [0, 16]
