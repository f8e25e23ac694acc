"""Our C code for the ends of rounds and for chains, against the same by torch's operations."""

from __future__ import annotations

import platform
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspec import LongSpec
from longspec.cache import Pages
from longspec.decoding import choose as choosing
from longspec.decoding import drafting
from longspec.decoding import round as rounds
from longspec.decoding.accept import accept_coupled
from longspec.decoding.choose import SamplingRows, gumbel
from longspec.decoding.methods import VANILLA, Method, Seq, Tree
from longspec.decoding.methods.drafted import Drafted
from longspec.decoding.native_chain import can_draft_chain
from longspec.decoding.native_round import (
    choose_tokens,
    describe_nodes,
    draft_noise,
    is_native,
    settle_round,
)
from longspec.decoding.round import settle
from longspec.decoding.sampling import Sampling
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree
from longspec.engine.engine import Engine
from longspec.engine.load import prepare_draft
from longspec.engine.memory import EngineSize
from longspec.models.native_linears import packed
from longspec.native.build import _load, code
from tests.decoding.scripted import ask, tiny_draft, tiny_engine, tiny_target
from tests.kernels.test_choose import SETTINGS, random_rows
from tests.kernels.test_tree import random_levels

pytestmark = pytest.mark.skipif(not is_native(torch.zeros(1)), reason="no C compiler here")


@pytest.mark.parametrize(("V", "spread"), [(7, 1.0), (1500, 4.0), (4999, 0.1), (49152, 3.0)])
def test_the_choice_is_the_same(V: int, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    B = 4 * len(SETTINGS)
    logits, seeds, positions, seen = random_rows(B, 1, V, spread, seed=V)
    logits[0, 5:] = -torch.inf  # as a constraint leaves them
    rows = replace(SamplingRows.of(SETTINGS * 4, V, torch.device("cpu")), seen=seen)
    for sampled in (True, False):
        found = choosing.choose(logits, rows, seeds, positions, sampled)
        with monkeypatch.context() as patch:
            patch.setattr(choosing, "is_native", lambda x: False)
            assert torch.equal(found, choosing.choose(logits, rows, seeds, positions, sampled))


@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx512f -mno-avx2"])
def test_older_processors_choose_the_same(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("no such flags")
    monkeypatch.setenv("CC", f"cc {flags}")
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    _load.cache_clear()
    try:
        assert code().lanes() == 8
        test_the_choice_is_the_same(1500, 4.0, monkeypatch)
        test_a_drafts_noise_is_that_of_choices()
    finally:
        monkeypatch.undo()
        _load.cache_clear()


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 40,000 positions, also of tokens that are rare."""
    V, num = 40, 40_000
    torch.manual_seed(0)
    row = torch.randn(1, V) * 2
    sampling = SamplingRows.of([Sampling(0.9)], V, torch.device("cpu"))
    found = choose_tokens(row.expand(num, -1), sampling, torch.tensor([3]), torch.arange(num), True)
    expected = (row[0] / 0.9).softmax(0) * num
    counts = torch.bincount(found, minlength=V)
    common = expected > 5
    assert float(((counts - expected)[common] ** 2 / expected[common]).sum()) < 80  # 1 in 10,000 at 39


def test_numbers_that_are_none_give_some_token() -> None:
    logits = torch.full((3, 50), torch.nan)
    logits[1, 7], logits[2, 9] = 1.0, torch.inf
    rows = SamplingRows.of([Sampling(0.7, top_k=5, top_p=0.9)] * 3, 50, torch.device("cpu"))
    for sampled in (True, False):
        found = choose_tokens(logits, rows, torch.arange(3), torch.arange(3), sampled)
        assert ((found >= 0) & (found < 50)).all()


def some_slots(width: int) -> Slots:
    """Four rows with texts; one has ended, one waits, one is near its limit."""
    target = tiny_target(vocab_size=20)
    slots = Slots.empty(target.config, None, 4, 60, 8, 8, width + 3, torch.device("cpu"), torch.float32)
    slots.lengths.copy_(torch.tensor([9, 12, 10, 17]))
    slots.limits.copy_(torch.tensor([40, 40, 40, 20]))
    slots.running.copy_(torch.tensor([True, False, True, True]))
    slots.active.copy_(torch.tensor([True, True, False, True]))
    slots.eos_ids[:, 0] = torch.tensor([3, -1, 4, -1])
    slots.text.copy_(torch.randint(4, slots.text.shape))
    slots.tables.copy_(torch.arange(1, 33).view(4, 8))
    slots.seeds.copy_(torch.arange(4))
    return slots


def copy_of(slots: Slots) -> Slots:
    parts: dict[str, Any] = {field.name: getattr(slots, field.name) for field in fields(slots)}
    parts = {name: part.clone() for name, part in parts.items() if isinstance(part, Tensor)}
    return replace(slots, **parts, sampling=SamplingRows(*(x.clone() for x in slots.sampling.tensors())))


def nodes_of(logits: Tensor, nodes: Tensor) -> Tensor:
    return logits[torch.arange(len(nodes)), nodes]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, repetition_penalty=1.5)])
@pytest.mark.parametrize(("shape", "accumulate"), [((), True), ((1, 1, 1), False), ((3, 5, 4), True)])
def test_a_round_ends_alike(shape: tuple[int, ...], accumulate: bool, sampling: Sampling) -> None:
    torch.manual_seed(5)
    width, sampled = len(shape) + 1, sampling.temperature > 0
    parents = random_levels(4, shape, 5)
    moved = 0
    for turn in range(12):
        ours = some_slots(width)
        ours.sampling.put(torch.arange(4), [sampling] * 4)
        ours.seen.scatter_(1, ours.text[:, :9], True)
        ours.seen.scatter_(1, ours.roots[:, None], True)
        tokens = torch.randint(4, parents.shape)  # so few that some paths are long
        tokens[:, 0] = ours.roots
        tree = TokenTree(tokens, parents, None, is_chain=max(shape, default=1) == 1)
        hidden, logits = torch.randn(*parents.shape, 16), torch.randn(*parents.shape, 20)
        logits[:, :, :4] += 3
        if turn == 0:
            hidden[0, :, 3] = torch.inf
        theirs, pages = copy_of(ours), torch.randn(2, 3, 2, 33 * 8, 4)
        kv = [Pages(pages[0].clone(), pages[1].clone(), 8) for _ in range(2)]
        found = accept_coupled(tree, partial(nodes_of, logits), theirs, sampled)
        settle(kv[0], theirs, tree, hidden, found, accumulate)
        _, at, _ = describe_nodes(parents, tree.is_chain, ours.lengths + 1, ours.tables, 8)
        path = (tokens, parents)
        choices = choose_tokens(logits.flatten(0, 1), ours.sampling, ours.seeds, at.flatten(), sampled, path)
        move = settle_round(tree, choices.view_as(tokens), hidden, ours, width, accumulate)
        if move is not None:
            moved += 1
            kv[1].commit(ours.tables, move[2], *move[:2])
        count = ours.report[:, 0]
        for row in range(4):
            kept = int(count[row])
            assert torch.equal(ours.report[row, : 1 + kept], theirs.report[row, : 1 + kept])
            assert torch.equal(ours.text[row, :20], theirs.text[row, :20])
        for name in ("lengths", "running", "num_unread", "feature"):
            moving = ours.running | ~ours.running if name != "feature" else count > 0
            assert torch.equal(getattr(ours, name)[moving], getattr(theirs, name)[moving]), name
        assert torch.equal(ours.seen, theirs.seen)
        assert torch.equal(kv[0].keys, kv[1].keys)
        assert torch.equal(kv[0].values, kv[1].values)
    assert (moved > 0) == (max(shape, default=1) > 1)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 4)])
def test_nodes_stand_where_they_should(shape: tuple[int, ...]) -> None:
    parents = random_levels(4, shape, 3)
    tree, slots = TokenTree(parents, parents), some_slots(4)
    lone = TokenTree(parents[:, :1], parents[:, :1])
    for one, is_chain in product((tree, lone), (False, max(shape) == 1)):
        sees, positions, places = describe_nodes(one.parents, is_chain, slots.lengths, slots.tables, 8)
        expected = one.sees()
        if sees is not None:
            assert expected is not None
            assert torch.equal(sees, expected)
        depths = torch.zeros(4, 1, dtype=torch.int64) if expected is None else expected.sum(-1) - 1
        assert torch.equal(positions, slots.lengths[:, None] + depths)
        entries = slots.lengths[:, None] + torch.arange(one.num_nodes)
        assert torch.equal(places, slots.tables.gather(1, entries // 8).long() * 8 + entries % 8)


def test_a_drafts_noise_is_that_of_choices() -> None:
    seeds, positions = torch.tensor([5, -7, 2**62]), torch.tensor([0, 3, 300_000])
    for ids in (torch.randint(150_000, (1003,)), torch.arange(8)):
        exact = gumbel(seeds, positions, ids)
        # fp32 is less sure where u is near 0 or near 1.
        assert (draft_noise(seeds, positions, ids) - exact).abs().quantile(0.99) < 1e-3
        assert draft_noise(seeds, positions, ids).isfinite().all()


@pytest.mark.parametrize(("temperature", "kind"), [(0.0, "int8"), (0.0, "target"), (0.8, "target")])
@pytest.mark.parametrize(
    ("method", "window"),
    [(Seq(5), 8), (Seq(5), 2), (Seq(5, min_confidence=0.3), 8), (Tree((1, 1, 1), max_nodes=3), 8)],
)
def test_chains_are_drafted_alike(
    method: Method, window: int, temperature: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C code and torch's operations draft the same chains: in batches, in texts and with chains that are
    longer than the draft's window, and after rounds that did not draft."""
    shape = {"vocab_size": 40, "num_layers": 5, "hidden_size": 36, "intermediate_size": 50, "head_dim": 16}
    target, propose = tiny_target(**shape), drafting.propose
    target.head = packed(target.head)  # type: ignore[assignment]
    prompts, proposed = [[7], [3, 9, 3, 9, 3], list(range(40))], dict[bool, list[list[list[int]]]]()
    for in_code in (True, False):
        trees = proposed[in_code] = []

        def noted(*given: Any, trees: list[Any] = trees) -> TokenTree:
            tree = propose(*given)
            trees.append(tree.tokens.tolist())
            return tree

        shape_of_draft: dict[str, Any] = {
            "draft_vocab": 32,
            "qkv_bias": True,
            "cross_layers": (0, 2, 4),
            "window": window,
        }
        draft = tiny_draft(target, std=0.1, **shape_of_draft)
        engine = Engine(target, *prepare_draft(draft, target, kind), size=EngineSize(3, 160, 16, 40))
        fitted = method.fit(engine.models)
        assert isinstance(fitted, Drafted)
        assert can_draft_chain(fitted, engine.models)
        monkeypatch.setattr(drafting, "propose", noted)
        if not in_code:
            monkeypatch.setattr(drafting, "can_draft_chain", lambda *_: False)
        ask(engine, prompts, VANILLA, new=30)
        ask(engine, prompts, method, Sampling(temperature), new=40)
    assert proposed[True] == proposed[False]
    lengths = {len(tree[0]) for tree in proposed[True]}
    assert lengths == {3} if isinstance(method, Tree) else max(lengths) == 6
    assert len(lengths) > 1 or not getattr(method, "min_confidence", 0), "some chains end early"


def test_torchs_default_dtype_changes_nothing(smollm2: LongSpec) -> None:
    """Other libraries set it for a while, in a process that answers."""
    asked: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_new_tokens": 12}
    expected = [
        smollm2.generate("Tell me a joke.", method=one, **asked).token_ids for one in ("seq", "lookup")
    ]
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            loaded = LongSpec.from_pretrained("smollm2-135m", max_rows=1, calibrate=False)
            for model in (smollm2, loaded):
                found = [model.generate("Tell me a joke.", method=one, **asked) for one in ("seq", "lookup")]
                assert [one.token_ids for one in found] == expected
        finally:
            torch.set_default_dtype(torch.float32)


def test_without_a_compiler_the_words_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(vocab_size=40)
    engine = tiny_engine(target, tiny_draft(target), max_rows=4)
    settings = Sampling(0.9, top_p=0.95, repetition_penalty=1.2)
    for method in (VANILLA, Seq(3), Tree((2, 3), max_nodes=5)):
        ours = ask(engine, [[1, 2, 3], [4, 5]], method, new=30, sampling=settings)
        with monkeypatch.context() as patch:
            for module in (rounds, choosing):
                patch.setattr(module, "is_native", lambda x: False)
            theirs = ask(engine, [[1, 2, 3], [4, 5]], method, new=30, sampling=settings)
        assert [one.tokens for one in ours] == [one.tokens for one in theirs]
