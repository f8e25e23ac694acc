"""Every method says what vanilla says, token for token, whatever the draft is worth."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspec import Generation, LongSpec, UserError
from longspec.api import prepare_draft
from longspec.cache import DraftCache
from longspec.config import DraftConfig
from longspec.decoding.accept import accept_coupled
from longspec.decoding.choose import Sampling
from longspec.decoding.loop import DecodeState, Method, decode, start
from longspec.decoding.methods.glide import Glide
from longspec.decoding.methods.lookup import Lookup
from longspec.decoding.methods.magicdec import MagicDec
from longspec.decoding.methods.vanilla import Vanilla
from longspec.decoding.row import Row
from longspec.decoding.tree import TokenTree
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.target import Transformer
from tests.decoding.scripted import SCRIPTS, Script, ScriptedGlide, tiny_target

PROMPTS = [
    "Write a haiku about the sea, and then explain each of its lines.",
    "What is the capital of France?",
    "Count from one to twenty, then count from one to twenty again.",
    "Hi",
]
TEMPERATURES: dict[str, Sampling] = {
    "greedy": Sampling(),
    "0.7": Sampling(temperature=0.7, top_p=0.9),
    "1.3": Sampling(temperature=1.3, repetition_penalty=1.2),
}
SHAPES = {"chain": (1, 1, 1, 1), "wide": (4, 16, 16), "odd": (3, 2, 5, 1), "pruned": (4, 8, 8)}
NEW = 24


def run(
    target: Transformer,
    prompts: list[list[int]],
    sampling: Sampling,
    seed: int,
    method: Method,
    new: int = NEW,
) -> list[Row]:
    """Decode all the prompts together; each row ends a little earlier than the one before."""
    rows = [Row(prompt, seed + index, new - 3 * index) for index, prompt in enumerate(prompts)]
    capacity = max(map(len, prompts)) + new + method.num_nodes
    state = start(target, target.new_cache(len(rows), capacity), rows, sampling)
    for _ in decode(state, method, accept_coupled):
        pass
    return rows


def check_figures(row: Row) -> None:
    """tau, accepted_by_depth and rounds add up to the tokens kept."""
    assert 1 + row.num_rounds + sum(row.accepted_by_depth) >= len(row.tokens)
    # Only the last round can have been cut, and then its bonus, or more, is missing.
    assert 1 + row.num_rounds + sum(row.accepted_by_depth) - len(row.tokens) <= 1
    assert row.tau == pytest.approx((len(row.tokens) - 1) / max(row.num_rounds, 1))
    assert row.accepted_by_depth == sorted(row.accepted_by_depth, reverse=True)
    assert all(count <= row.num_rounds for count in row.accepted_by_depth)


_VANILLA: dict[Any, list[list[int]]] = {}


def vanilla(
    model: LongSpec, batch: int, temperature: str, seed: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and what vanilla answers, computed once."""
    encode = model.engine.encoder.encode
    prompts = [encode(prompt, False, 49152) for prompt in PROMPTS[:batch]]
    key = (batch, temperature, seed)
    if key not in _VANILLA:
        rows = run(model.engine.target, prompts, TEMPERATURES[temperature], seed, Vanilla())
        _VANILLA[key] = [row.tokens for row in rows]
    return prompts, _VANILLA[key]


def check(model: LongSpec, kind: str, shape: str, batch: int, temperature: str, seed: int) -> None:
    prompts, expected = vanilla(model, batch, temperature, seed)
    target = model.engine.target
    method: Method
    if kind in SCRIPTS:
        most = 12 if shape == "pruned" else None
        method = ScriptedGlide(target, expected, SCRIPTS[kind], SHAPES[shape], max_nodes=most)
    elif kind == "random":
        draft = GlideDraft(target.config, DraftConfig(window=16))
        draft.initialise(torch.Generator().manual_seed(seed))
        head = DraftHead(target, None)
        method = Glide(
            draft, head, SHAPES[shape], 12 if shape == "pruned" else None, draws=False, name="tree"
        )
    elif kind == "lookup":
        method = Lookup(gamma=len(SHAPES[shape]))
    else:
        window = 4000 if kind == "magicdec whole" else 24
        method = MagicDec(len(SHAPES[shape]), sinks=4, window=window, draws=False)
    rows = run(target, prompts, TEMPERATURES[temperature], seed, method)
    assert [row.tokens for row in rows] == expected
    depth = len(SHAPES[shape])
    for row in rows:
        check_figures(row)
        if kind in ("oracle", "magicdec whole"):
            whole = (len(row.tokens) - 1) // (depth + 1)
            assert row.num_rounds == -(-(len(row.tokens) - 1) // (depth + 1)), (
                "all that is drafted is accepted"
            )
            assert row.accepted_by_depth[-1] in (whole, whole + 1)
        if kind == "adversary":
            assert row.accepted_by_depth == []
            assert row.tau == 1.0


KINDS = (*SCRIPTS, "random", "magicdec", "magicdec whole", "lookup")
EVERYTHING = [
    (kind, shape, batch, temperature, seed)
    for kind, shape, batch, temperature, seed in itertools.product(
        KINDS, SHAPES, (1, 4), TEMPERATURES, (1, 20)
    )
    if kind in (*SCRIPTS, "random") or shape == "chain"
]


def pairwise() -> Iterator[tuple[str, str, int, str, int]]:
    """Few combinations in which every pair of values of two factors occurs."""
    missing = {pair for one in EVERYTHING for pair in itertools.combinations(enumerate(one), 2)}
    while missing:
        best = max(EVERYTHING, key=lambda one: len(missing & set(itertools.combinations(enumerate(one), 2))))
        missing -= set(itertools.combinations(enumerate(best), 2))
        yield best


@pytest.mark.parametrize("combination", list(pairwise()), ids=str)
def test_equals_vanilla(smollm2: LongSpec, combination: tuple[str, str, int, str, int]) -> None:
    check(smollm2, *combination)


@pytest.mark.full
@pytest.mark.parametrize("combination", EVERYTHING, ids=str)
def test_equals_vanilla_in_every_combination(
    smollm2: LongSpec, combination: tuple[str, str, int, str, int]
) -> None:
    check(smollm2, *combination)


def test_an_end_inside_an_accepted_path_ends_the_row_there(smollm2: LongSpec) -> None:
    target, encode = smollm2.engine.target, smollm2.engine.encoder.encode
    prompts = [encode(prompt, False, 49152) for prompt in PROMPTS[1:3]]
    whole = [row.tokens for row in run(target, prompts, Sampling(), 0, Vanilla())]
    eos = whole[0].index(2)  # "The capital of France is Paris." and then the end
    assert eos % 5 not in (0, 4), "or it would not lie inside a path"
    countdown = iter([False] * 7 + [True])
    rows = [
        Row(prompts[0], 0, NEW, frozenset({2})),
        Row(prompts[1], 1, NEW, stop_after=lambda token: next(countdown)),
    ]
    method = ScriptedGlide(target, whole, SCRIPTS["oracle"], (1, 1, 1, 1))
    state = start(target, target.new_cache(2, 200), rows, Sampling())
    for _ in decode(state, method, accept_coupled):
        pass
    assert (rows[0].tokens, rows[0].finish_reason) == (whole[0][: eos + 1], "eos")
    assert (rows[1].tokens, rows[1].finish_reason) == (whole[1][:8], "stop")
    for row in rows:
        check_figures(row)
        assert len(row.depths) == len(row.tokens)


DRAFTS = {
    "as published": DraftConfig(),
    "ours": DraftConfig(
        window=32, cross_layers=(9, 19, -1), use_feature=True, final_norm=True, draft_vocab=3000
    ),
}


@pytest.fixture(params=DRAFTS)
def drafting(smollm2: LongSpec, request: pytest.FixtureRequest) -> LongSpec:
    """The default target with a random draft."""
    target = smollm2.engine.target
    draft = GlideDraft(target.config, DRAFTS[request.param])
    draft.initialise(torch.Generator().manual_seed(3))
    return LongSpec(replace(smollm2.engine, draft=prepare_draft(draft, target), draft_name="random"))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}], ids=str)
def test_a_random_draft_changes_nothing(drafting: LongSpec, options: dict[str, Any]) -> None:
    prompts = PROMPTS[:2]
    expected = drafting.generate(prompts, max_new_tokens=16, method="vanilla", **options)
    methods: list[dict[str, Any]] = [
        {"method": "seq", "gamma": 3},
        {"method": "seq", "gamma": 6, "min_confidence": 0.01},
        {"method": "tree"},
        {"method": "tree", "max_nodes": 9},
        {"method": "tree", "max_nodes": 24, "num_copied": 12},
    ]
    for method in methods:
        drafting.reset()
        answers = drafting.generate(prompts, max_new_tokens=16, **method, **options)
        assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
        assert all(one.draft == "random" and one.method == method["method"] for one in answers)


def test_nan_in_the_draft_changes_nothing(drafting: LongSpec) -> None:
    assert drafting.engine.draft is not None
    drafting.engine.draft[0].ffn_norm.weight.data.fill_(torch.nan)
    expected = drafting.generate(PROMPTS[1], max_new_tokens=12, method="vanilla")
    for options in ({"method": "seq"}, {"method": "tree", "tree_shape": (3, 4, 4), "max_nodes": 5}):
        answer: Generation = drafting.generate(PROMPTS[1], max_new_tokens=12, **options)
        assert answer.token_ids == expected.token_ids


def test_a_long_prompt_is_lossless_and_the_drafts_memory_flat(drafting: LongSpec) -> None:
    text = "".join(f"Item {i} costs {i * 7 % 90} coins and lies on shelf {i % 13}. " for i in range(420))
    ids = drafting.tokenizer(text + "What does item 12 cost?")["input_ids"][-6000:]
    assert len(ids) == 6000
    expected = drafting.generate(ids, max_new_tokens=16, method="vanilla")
    method_options: list[dict[str, Any]] = [
        {"method": "seq"},
        {"method": "tree", "tree_shape": (4, 8, 8)},
        {"method": "magicdec", "window": 256},
        {"method": "lookup"},
    ]
    for options in method_options:
        assert drafting.generate(ids, max_new_tokens=16, **options).token_ids == expected.token_ids


def test_draft_memory_is_the_same_at_any_context(drafting: LongSpec) -> None:
    from longspec.decoding.methods.make import MethodOptions, make_method

    sizes = set()
    for context in (1000, 8000):
        method, _ = make_method(MethodOptions(method="tree"), Sampling(), drafting.engine.draft)
        target = drafting.engine.target
        cache = target.new_cache(1, context + 200)
        cache.advance(context)  # what lies in the cache does not matter here
        target.rope.reserve(cache.capacity)
        state = start(target, cache, [Row([5] * context, 0, 4)], Sampling())
        with torch.inference_mode():
            method.begin(state)
            method.propose(state)
        sizes.add(method.ring.num_bytes)  # type: ignore[attr-defined]
    assert sizes == {DraftCache.size_of(target.config, method._draft.config, 64, target.dtype)}  # type: ignore[attr-defined]


class RandomTrees:
    """Proposes any trees at all, with the right tokens sprinkled in."""

    name, num_nodes, depth = "random", 12, 11
    tree_shape: tuple[int, ...] | None = None
    device_key: tuple[Hashable, ...] | None = None

    def __init__(self, answers: list[list[int]], seed: int) -> None:
        self._answers = answers
        self._generator = torch.Generator().manual_seed(seed)

    def begin(self, state: DecodeState) -> None:
        pass

    def follow(self, state: DecodeState) -> None:
        pass

    def propose(self, state: DecodeState) -> TokenTree:
        B, g = len(state.rows), self._generator
        N = int(torch.randint(1, self.num_nodes + 1, (), generator=g))
        parents = torch.zeros(B, N, dtype=torch.int64)
        tokens = torch.randint(state.target.config.vocab_size, (B, N), generator=g)
        tokens[:, 0] = state.roots
        for row in range(B):
            depths = [0] * N
            for node in range(1, N):
                parents[row, node] = torch.randint(node, (), generator=g)
                depths[node] = depths[int(parents[row, node])] + 1
                place = int(state.cache.lengths[row]) + depths[node] - len(state.rows[row].prompt)
                if place < len(self._answers[row]) and torch.rand((), generator=g) < 0.6:
                    tokens[row, node] = self._answers[row][place]
        return TokenTree(tokens, parents)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    temperature=st.sampled_from(list(TEMPERATURES)),
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    max_nodes=st.sampled_from([None, 2, 5, 9]),
    script=st.sampled_from(list(SCRIPTS)),
)
def test_any_tree_of_any_shape_on_a_tiny_model(
    seed: int, lengths: list[int], temperature: str, shape: list[int], max_nodes: int | None, script: str
) -> None:
    target = tiny_target(seed, vocab_size=40)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(40, (length,), generator=generator).tolist() for length in lengths]
    sampling = TEMPERATURES[temperature]
    expected = [row.tokens for row in run(target, prompts, sampling, seed, Vanilla())]
    methods: list[Method] = [
        ScriptedGlide(target, expected, SCRIPTS[script], tuple(shape), max_nodes=max_nodes),
        ScriptedGlide(target, expected, SCRIPTS[script], (1,) * len(shape), min_confidence=0.3),
        RandomTrees(expected, seed),
        MagicDec(len(shape), sinks=seed % 3, window=1 + seed % 7, draws=False),
        Lookup(len(shape), max_ngram=2, min_ngram=1),
    ]
    for method in methods:
        rows = run(target, prompts, sampling, seed, method)
        assert [row.tokens for row in rows] == expected, method.name
        for row in rows:
            check_figures(row)


@pytest.mark.parametrize("temperature", ["greedy", "0.7"])
def test_a_chain_ends_where_the_draft_doubts(temperature: str) -> None:
    """Behind the first token that it does not know; rows that go on take the others along."""
    target, sampling = tiny_target(4, vocab_size=4000), TEMPERATURES[temperature]
    prompts = [[1, 2, 3], [4, 5]]
    expected = [row.tokens for row in run(target, prompts, sampling, 1, Vanilla(), new=40)]
    scripts: dict[str, Script] = {
        "all know": lambda row, place: True,
        "one knows": lambda row, place: row == 1,
        "none knows": lambda row, place: False,
        "at times": lambda row, place: place % 7 not in (2, 5),
    }
    drafted: dict[str, list[int]] = {}
    for name, script in scripts.items():
        sizes: list[int] = []

        class Noting(ScriptedGlide):
            def propose(self, state: DecodeState, sizes: list[int] = sizes) -> TokenTree:
                tree = super().propose(state)
                sizes.append(tree.num_nodes)
                return tree

        plain = run(target, prompts, sampling, 1, ScriptedGlide(target, expected, script, (1,) * 5), new=40)
        method = Noting(target, expected, script, (1,) * 5, min_confidence=0.99)
        rows = run(target, prompts, sampling, 1, method, new=40)
        assert [row.tokens for row in rows] == expected
        assert [row.depths for row in rows] == [row.depths for row in plain], "only what is wrong is missing"
        drafted[name] = sizes
    assert set(drafted["all know"]) == {6}
    assert set(drafted["none knows"]) == {2}
    assert {2, 6} <= set(drafted["one knows"]) <= {2, 6}, "the one that knows ends first"
    assert {3, 4} <= set(drafted["at times"]) <= {2, 3, 4, 5}


@pytest.mark.parametrize("kind", ["chain", "tree", "magicdec"])
def test_a_row_that_ends_early_keeps_within_its_room(kind: str) -> None:
    """The longest row ends inside its first round, far past its limit, while the other goes on and on."""
    target = tiny_target(vocab_size=40)
    prompts, news = [[1, 2, 3] * 14, [4, 5]], (2, 40)

    def rows() -> list[Row]:
        return [Row(prompt, 3, new) for prompt, new in zip(prompts, news, strict=True)]

    def decoded(method: Method, longest: int) -> list[list[int]]:
        found = rows()
        capacity = longest + method.num_nodes
        state = start(target, target.new_cache(2, capacity), found, Sampling())
        for _ in decode(state, method, accept_coupled):
            pass
        return [row.tokens for row in found]

    longest = max(len(prompt) + new for prompt, new in zip(prompts, news, strict=True))
    expected = decoded(Vanilla(), longest)
    answers = [decoded_alone(target, prompt) for prompt in prompts]
    methods: dict[str, Method] = {
        "chain": ScriptedGlide(target, answers, SCRIPTS["oracle"], (1,) * 8),
        "tree": ScriptedGlide(target, answers, SCRIPTS["oracle"], (2, 4, 4, 4, 2, 2)),
        "magicdec": MagicDec(8, sinks=0, window=100, draws=False),
    }
    method = methods[kind]
    # No more room than a request makes, so that a step too far is an error.
    assert decoded(method, longest) == expected


def decoded_alone(target: Transformer, prompt: list[int]) -> list[int]:
    """A long answer to one prompt."""
    return run(target, [prompt], Sampling(), 3, Vanilla(), new=60)[0].tokens


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"method": "seq", "gamma": 0}, "gamma is 0"),
        ({"method": "tree", "tree_shape": ()}, "tree_shape is"),
        ({"method": "tree", "tree_shape": (4, 0)}, "tree_shape is"),
        ({"method": "tree", "tree_shape": (600,)}, "601 nodes"),
        ({"method": "tree", "tree_shape": (1,) * 9}, "a depth of 9"),
        ({"method": "tree", "max_nodes": 1}, "max_nodes is 1"),
        ({"method": "tree", "num_copied": 65}, "num_copied is 65"),
        ({"method": "seq", "min_confidence": 1.5}, "min_confidence is 1.5"),
        ({"method": "seq", "min_confidence": "high"}, "min_confidence is 'high'"),
        ({"method": "magicdec", "window": 0}, "window is 0"),
        ({"method": "seq", "acceptance": "hopeful"}, "'hopeful' is unknown"),
    ],
)
def test_bad_method_options_are_named(drafting: LongSpec, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        drafting.generate("Hi", **options)


def test_a_method_that_needs_a_draft_says_so(smollm2: LongSpec) -> None:
    with pytest.raises(UserError, match="'tree' needs a draft"):
        LongSpec(replace(smollm2.engine, draft=None)).generate("Hi", method="tree")
