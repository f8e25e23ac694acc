"""Rounds that ask nothing of the host emit what the others emit; a CPU runs them as a GPU would."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from longspec.config import DraftConfig
from longspec.decoding.accept import accept_coupled
from longspec.decoding.choose import Sampling
from longspec.decoding.device import RoundStore, needs_no_host
from longspec.decoding.guard import Guarded, Prices
from longspec.decoding.loop import DecodeState, Method, decode, prefill, start
from longspec.decoding.methods.glide import Glide
from longspec.decoding.methods.lookup import Lookup
from longspec.decoding.methods.magicdec import MagicDec
from longspec.decoding.methods.vanilla import Vanilla
from longspec.decoding.row import Row
from longspec.decoding.tree import TokenTree
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.target import Transformer
from tests.decoding.scripted import SCRIPTS, ScriptedGlide, count_proposals, tiny_target

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.9)]


def answers(
    target: Transformer,
    method: Method,
    sampling: Sampling,
    store: RoundStore | None,
    prompts: list[list[int]],
) -> list[Row]:
    rows = [Row(prompt, 7 + place, 30 - 4 * place, frozenset({0})) for place, prompt in enumerate(prompts)]
    cache = target.new_cache(len(rows), 64 + method.num_nodes)
    state = start(target, cache, rows, sampling)
    assert store is None or needs_no_host(state, method)
    for _ in decode(state, method, accept_coupled, rounds=store):
        pass
    assert int(cache.lengths.max()) + method.num_nodes <= cache.capacity
    return rows


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 2)])
@pytest.mark.parametrize("count", [1, 3])
def test_device_rounds_say_what_vanilla_says(sampling: Sampling, shape: tuple[int, ...], count: int) -> None:
    target = tiny_target(vocab_size=11, max_length=256)
    prompts = PROMPTS[:count]
    expected = answers(target, Vanilla(), sampling, None, prompts)
    texts = [row.tokens for row in expected]
    assert any(row.finish_reason == "eos" for row in expected) or count == 1
    draft = GlideDraft(target.config, DraftConfig(window=8, max_lag=8, use_feature=True))
    draft.initialise(torch.Generator().manual_seed(1), std=0.3)
    methods: list[Method] = [
        Vanilla(),
        Glide(draft, DraftHead(target, None), shape, 6, draws=False, name="tree"),
        Glide(draft, DraftHead(target, None), shape, 8, draws=False, name="tree", num_copied=5),
        MagicDec(len(shape), sinks=1, window=4, draws=False),
        *(ScriptedGlide(target, texts, script, shape) for script in SCRIPTS.values()),
    ]
    for method in methods:
        on_host = answers(target, method, sampling, None, prompts)
        on_device = answers(target, method, sampling, RoundStore(), prompts)
        assert [row.tokens for row in on_host] == texts
        assert [row.tokens for row in on_device] == texts
        assert [row.depths for row in on_device] == [row.depths for row in on_host]
        assert [row.num_rounds for row in on_device] == [row.num_rounds for row in on_host]


@pytest.mark.parametrize("max_nodes", [2, 3])
def test_a_few_nodes_of_a_deep_tree_stay_within_the_cache(max_nodes: int) -> None:
    """The cache has room for the text and the nodes, and no table reaches further."""
    target = tiny_target(vocab_size=11)
    draft = GlideDraft(target.config, DraftConfig(window=16, max_lag=8))
    draft.initialise(torch.Generator().manual_seed(1), std=0.3)
    said = []
    for num_copied in (0, 8):
        glide = Glide(draft, DraftHead(target, None), (2,) * 6, max_nodes, False, "tree", 0.0, num_copied)
        for method in (glide, Guarded(glide, Prices(((max_nodes, 9.0),)))):
            row = Row(PROMPTS[0], 0, 40)
            cache = target.new_cache(1, len(row.prompt) + 40 + max_nodes)
            for _ in decode(start(target, cache, [row], Sampling()), method, rounds=RoundStore()):
                pass
            said.append(row.tokens)
    assert said == [said[0]] * 4
    assert len(said[0]) == 40


def test_rounds_are_kept_between_requests_and_go_with_their_cache() -> None:
    target, store = tiny_target(vocab_size=11), RoundStore()
    draft = GlideDraft(target.config, DraftConfig(window=8))
    draft.initialise(torch.Generator().manual_seed(1), std=0.3)
    cache = target.new_cache(1, 64)

    def answer(prompt: list[int], sampling: Sampling, rounds: RoundStore | None) -> list[int]:
        cache.lengths.zero_()
        row = Row(prompt, 3, 12)
        method = Glide(draft, DraftHead(target, None), (2, 2), None, draws=False, name="tree")
        for _ in decode(start(target, cache, [row], sampling), method, accept_coupled, rounds=rounds):
            pass
        return row.tokens

    for sampling in SAMPLINGS:
        for prompt in PROMPTS:
            assert answer(prompt, sampling, store) == answer(prompt, sampling, None)
    assert len(store._kept) == 2, "one for each way to sample"
    cache = target.new_cache(1, 64)
    answer(PROMPTS[0], SAMPLINGS[0], store)
    assert len(store._kept) == 1


@pytest.mark.parametrize("script", ["oracle", "adversary", "half"])
def test_the_guard_switches_between_two_kinds_of_rounds(script: str) -> None:
    target, store = tiny_target(4, vocab_size=40), RoundStore()
    cache = target.new_cache(2, 128)

    def decoded(method: Method) -> list[Row]:
        cache.lengths.zero_()
        rows = [Row(prompt, 9, 100) for prompt in PROMPTS[:2]]
        rounds = None if isinstance(method, Vanilla) else store
        for _ in decode(start(target, cache, rows, Sampling(0.9)), method, rounds=rounds):
            pass
        return rows

    texts = [row.tokens for row in decoded(Vanilla())]
    inner = ScriptedGlide(target, texts, SCRIPTS[script], (1, 1, 1))
    inner.device_key = (script,)
    drafted = count_proposals(inner)
    alone = decoded(inner)
    assert len(drafted) == max(row.num_rounds for row in alone) + 1, "one round is on its way at the end"
    for _ in range(2):  # the second time with rounds that were kept
        drafted.clear()
        rows = decoded(Guarded(inner, Prices(((4, 1.4),))))
        assert [row.tokens for row in rows] == texts
        rounds = max(row.num_rounds for row in rows)
        if script == "adversary":
            assert 8 < len(drafted) < 20, "most rounds are the target's alone; it is tried again"
        else:
            assert len(drafted) == rounds + 1
            assert [row.depths for row in rows] == [row.depths for row in alone]


class Fitful(Guarded):
    """Rests in two rounds of three."""

    booked = 0

    def book(self, emitted: Sequence[int], num_nodes: int, prices: Prices | None = None) -> None:
        self.booked += 1

    @property
    def speculates(self) -> bool:
        return self.booked % 3 == 0


@pytest.mark.parametrize("num_copied", [0, 6])
@pytest.mark.parametrize("meanwhile", ["rest", "rest on the device", "copying"])
def test_after_a_rest_the_draft_proposes_what_it_would_have(meanwhile: str, num_copied: int) -> None:
    """Its own keys and values must follow through the rounds in which it is not asked."""
    target = tiny_target(vocab_size=11)
    draft = GlideDraft(target.config, DraftConfig(window=8, max_lag=8, use_feature=True))
    draft.initialise(torch.Generator().manual_seed(1), std=0.3)
    proposed: list[tuple[int, list[list[int]]]] = []

    class Noting(Glide):
        def propose(self, state: DecodeState) -> TokenTree:
            tree = super().propose(state)
            proposed.append((int(state.cache.lengths), tree.tokens.tolist()))
            return tree

    def glide(kind: type[Glide]) -> Glide:
        head = DraftHead(target, None)
        return kind(draft, head, (3, 3), None, draws=False, name="tree", num_copied=num_copied)

    row, sampling = Row(PROMPTS[0], 3, 40), Sampling(1.5)
    state = start(target, target.new_cache(1, 64), [row], sampling)
    rounds = RoundStore() if meanwhile.endswith("device") else None
    method: Method = Fitful(glide(Noting), Prices(()))
    if meanwhile == "copying":
        method = Guarded(glide(Noting), Prices(()), (Lookup(4), Prices(())))
    for _ in decode(state, method, rounds=rounds):
        pass
    assert 5 < len(proposed) < row.num_rounds
    text = [*row.prompt, *row.tokens]
    for length, tokens in proposed:
        if length >= len(text):
            continue  # it was on its way when the text ended
        fresh = start(target, target.new_cache(1, 64), [Row(text[:length], 3, 40)], sampling)
        again = glide(Glide)
        with torch.inference_mode():
            prefill(fresh, 64)
            fresh.emitted = torch.tensor([[text[length]]])
            again.begin(fresh)
            assert again.propose(fresh).tokens.tolist() == tokens


def test_what_needs_the_host_says_so() -> None:
    target = tiny_target(vocab_size=11)
    cache = target.new_cache(1, 64)
    state = start(target, cache, [Row([1, 2], 0, 4)], Sampling())
    assert needs_no_host(state, Vanilla())
    assert not needs_no_host(state, Lookup(3))
    penalised = start(target, cache, [Row([1, 2], 0, 4)], Sampling(repetition_penalty=1.2))
    assert not needs_no_host(penalised, Vanilla())
