"""Every method says what vanilla says, token for token, whatever the draft is worth."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspec import Generation, LongSpec, UserError
from longspec.cache import DraftRing
from longspec.config import DraftConfig
from longspec.decoding import drafting as drafts
from longspec.decoding.methods import VANILLA, Lookup, MagicDec, Method, Tree
from longspec.decoding.round import Models
from longspec.decoding.sampling import Sampling
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree
from longspec.engine.engine import Engine
from longspec.engine.load import prepare_draft
from longspec.engine.make import make_engine
from longspec.engine.sequence import Sequence
from longspec.models.draft import GlideDraft
from tests.decoding.scripted import (
    SCRIPTS,
    Answers,
    Script,
    ScriptedSeq,
    ScriptedTree,
    answers_of,
    ask,
    tiny_draft,
    tiny_engine,
    tiny_target,
)

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
SHAPES = {"chain": (1, 1, 1, 1), "wide": (4, 8, 8), "odd": (3, 2, 5, 1), "pruned": (4, 8, 8)}
NEW = 10


def check_figures(one: Sequence) -> None:
    """tau, accepted_by_depth and rounds add up to the tokens kept."""
    assert 1 + one.num_rounds + sum(one.accepted_by_depth) >= len(one.tokens)
    # Only the last round can have been cut, and then its bonus, or more, is missing.
    assert 1 + one.num_rounds + sum(one.accepted_by_depth) - len(one.tokens) <= 1
    assert one.tau == pytest.approx((len(one.tokens) - 1) / max(one.num_rounds, 1))
    assert one.accepted_by_depth == sorted(one.accepted_by_depth, reverse=True)
    assert all(count <= one.num_rounds for count in one.accepted_by_depth)
    assert len(one.depths) == len(one.tokens)


@pytest.fixture(scope="module")
def large(_loaded: LongSpec) -> Engine:
    """The default target with a random draft."""
    draft = tiny_draft(_loaded.target, window=16, max_lag=32, std=0.02)
    engine = tiny_engine(_loaded.target, draft, max_length=256)
    return engine


_VANILLA: dict[Any, list[Sequence]] = {}


def method_for(kind: str, shape: tuple[int, ...], max_nodes: int | None, answers: Answers) -> Method:
    if kind in SCRIPTS:
        return ScriptedTree(shape, max_nodes, answers=answers, script=SCRIPTS[kind])
    if kind == "random":
        return Tree(shape, max_nodes)
    if kind == "lookup":
        return Lookup(len(shape))
    return MagicDec(len(shape), sinks=4, window=4000 if "whole" in kind else 24)


def check(model: LongSpec, engine: Engine, combination: tuple[str, str, int, str, int]) -> None:
    kind, shape, batch, temperature, seed = combination
    prompts = [model.encoder.encode(prompt, False, 49152) for prompt in PROMPTS[:batch]]
    sampling, key = TEMPERATURES[temperature], (batch, temperature, seed)
    if key not in _VANILLA:
        _VANILLA[key] = ask(engine, prompts, VANILLA, sampling, seed, NEW)
    expected, depth = _VANILLA[key], len(SHAPES[shape])
    most = 12 if shape == "pruned" else None
    method = method_for(kind, SHAPES[shape], most, answers_of(expected))
    asked = ask(engine, prompts, method, sampling, seed, NEW)
    assert [one.tokens for one in asked] == [one.tokens for one in expected]
    for one in asked:
        check_figures(one)
        if kind in ("oracle", "magicdec whole"):
            whole = (len(one.tokens) - 1) // (depth + 1)
            assert one.num_rounds == -(-(len(one.tokens) - 1) // (depth + 1)), "all is accepted"
            assert one.accepted_by_depth[-1] in (whole, whole + 1)
        if kind == "adversary":
            assert one.accepted_by_depth == []
            assert one.tau == 1.0


KINDS = (*SCRIPTS, "random", "magicdec", "magicdec whole", "lookup")
EVERYTHING = [
    (kind, shape, batch, temperature, seed)
    for kind, shape, batch, temperature, seed in itertools.product(
        KINDS, SHAPES, (1, 3), TEMPERATURES, (1, 20)
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
def test_equals_vanilla(
    smollm2: LongSpec, large: Engine, combination: tuple[str, str, int, str, int]
) -> None:
    check(smollm2, large, combination)


@pytest.mark.full
@pytest.mark.parametrize("combination", EVERYTHING, ids=str)
def test_equals_vanilla_in_every_combination(
    smollm2: LongSpec, large: Engine, combination: tuple[str, str, int, str, int]
) -> None:
    check(smollm2, large, combination)


def test_an_end_inside_an_accepted_path_ends_the_row_there(smollm2: LongSpec, large: Engine) -> None:
    prompts = [smollm2.encoder.encode(prompt, False, 49152) for prompt in PROMPTS[1:3]]
    whole = ask(large, prompts, seed=50, new=27)
    eos = whole[0].tokens.index(2)  # "The capital of France is Paris." and then the end
    assert eos % 5 not in (0, 4), "or it would not lie inside a path"
    countdown = iter([False] * 7 + [True])
    method = ScriptedTree((1, 1, 1, 1), answers=answers_of(whole))
    asked = [
        Sequence(prompts[0], 24, seed=50, eos_ids=frozenset({2}), method=method),
        Sequence(prompts[1], 24, seed=51, method=method, stop_after=lambda token: next(countdown)),
    ]
    large.run(asked)
    assert (asked[0].tokens, asked[0].finish_reason) == (whole[0].tokens[: eos + 1], "eos")
    assert (asked[1].tokens, asked[1].finish_reason) == (whole[1].tokens[:8], "stop")
    for one in asked:
        check_figures(one)


DRAFTS = {
    "as published": DraftConfig(),
    "ours": DraftConfig(
        window=32, cross_layers=(9, 19, -1), use_feature=True, final_norm=True, draft_vocab=3000
    ),
}


@pytest.fixture(params=DRAFTS)
def drafting(smollm2: LongSpec, request: pytest.FixtureRequest) -> LongSpec:
    """The default target with a random draft."""
    draft = GlideDraft(smollm2.target.config, DRAFTS[request.param])
    draft.initialise(torch.Generator().manual_seed(3))
    made = prepare_draft(draft, smollm2.target)
    engine = make_engine(smollm2.target, *made, max_length=8192, max_rows=2, kv_memory=2**30)
    return LongSpec(engine, smollm2.encoder, "random", draft_name="random")


@pytest.mark.parametrize(
    ("drafting", "options"),
    [("as published", {"temperature": 0.0}), ("ours", {"temperature": 0.9, "seed": 5})],
    indirect=["drafting"],
    ids=str,
)
def test_a_random_draft_changes_nothing(drafting: LongSpec, options: dict[str, Any]) -> None:
    prompts = PROMPTS[:2]
    expected = drafting.generate(prompts, max_new_tokens=8, method="vanilla", **options)
    methods: list[dict[str, Any]] = [
        {"method": "seq", "gamma": 3},
        {"method": "seq", "gamma": 6, "min_confidence": 0.01},
        {"method": "tree"},
        {"method": "tree", "max_nodes": 24, "num_lookup": 12},
    ]
    for method in methods:
        drafting.reset()
        answers = drafting.generate(prompts, max_new_tokens=8, **method, **options)
        assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
        assert all(one.draft == "random" and one.method == method["method"] for one in answers)


def test_nan_in_the_draft_changes_nothing(drafting: LongSpec) -> None:
    assert drafting.engine.models.draft is not None
    drafting.engine.models.draft.ffn_norm.weight.data.fill_(torch.nan)
    expected = drafting.generate(PROMPTS[1], max_new_tokens=12, method="vanilla")
    for options in ({"method": "seq"}, {"method": "tree", "tree_shape": (3, 4, 4), "max_nodes": 5}):
        answer: Generation = drafting.generate(PROMPTS[1], max_new_tokens=12, **options)
        assert answer.token_ids == expected.token_ids


def test_a_long_prompt_is_lossless_and_the_drafts_memory_flat(drafting: LongSpec) -> None:
    text = "".join(f"Item {i} costs {i * 7 % 90} coins and lies on shelf {i % 13}. " for i in range(220))
    ids = drafting.tokenizer(text + "What does item 12 cost?")["input_ids"][-1000:]
    assert len(ids) == 1000
    expected = drafting.generate(ids, max_new_tokens=8, method="vanilla")
    method_options: list[dict[str, Any]] = [
        {"method": "seq"},
        {"method": "tree", "tree_shape": (4, 8, 8)},
        {"method": "magicdec", "window": 256},
        {"method": "lookup"},
    ]
    for options in method_options:
        assert drafting.generate(ids, max_new_tokens=8, **options).token_ids == expected.token_ids
    draft, ring = drafting.engine.models.draft, drafting.engine.device.slots.ring
    assert draft is not None
    assert ring is not None
    config = drafting.target.config
    num_nodes = ring.positions.shape[1] - ring.window - 1
    assert num_nodes < 200
    assert ring.num_bytes == 3 * DraftRing.size_of(config, draft.config, num_nodes, torch.float32)


@dataclass(frozen=True)
class RandomTrees(Method):
    """Proposes any trees at all, with the right tokens sprinkled in."""

    name = "random"

    answers: Answers = field(default_factory=dict, compare=False)
    generator: torch.Generator = field(default_factory=torch.Generator, compare=False)

    @property
    def num_nodes(self) -> int:
        return 12

    def propose(self, models: Models, rows: Slots, sampled: bool) -> TokenTree:
        B, g = rows.num_rows, self.generator
        N = int(torch.randint(1, self.num_nodes + 1, (), generator=g))
        parents = torch.zeros(B, N, dtype=torch.int64)
        tokens = torch.randint(models.target.config.vocab_size, (B, N), generator=g)
        tokens[:, 0] = rows.roots
        for row, (seed, length) in enumerate(zip(rows.seeds.tolist(), rows.lengths.tolist(), strict=True)):
            num_prompt, answer = self.answers.get(seed, (0, []))
            depths = [0] * N
            for node in range(1, N):
                parents[row, node] = torch.randint(node, (), generator=g)
                depths[node] = depths[int(parents[row, node])] + 1
                place = length + depths[node] - num_prompt
                if 0 <= place < len(answer) and torch.rand((), generator=g) < 0.6:
                    tokens[row, node] = answer[place]
        return TokenTree(tokens, parents)


@settings(max_examples=25, deadline=None)
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
    draft = tiny_draft(target, window=16)
    engine = tiny_engine(target, draft, max_length=96, page_size=4)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(40, (length,), generator=generator).tolist() for length in lengths]
    run = partial(ask, engine, prompts, sampling=TEMPERATURES[temperature], seed=seed)
    expected = run(VANILLA)
    answers = answers_of(expected)
    script_of: dict[str, Any] = {"answers": answers, "script": SCRIPTS[script]}
    methods = [
        ScriptedTree(tuple(shape), max_nodes, **script_of),
        ScriptedSeq(len(shape), min_confidence=0.3, **script_of),
        RandomTrees(answers, torch.Generator().manual_seed(seed)),
        MagicDec(gamma=len(shape), sinks=seed % 3, window=1 + seed % 7),
        Lookup(gamma=len(shape), max_ngram=1),
    ]
    for method in methods:
        asked = run(method)
        assert [one.tokens for one in asked] == [one.tokens for one in expected], method
        for one in asked:
            check_figures(one)


@pytest.mark.parametrize("temperature", ["greedy", "0.7"])
def test_a_chain_ends_where_the_draft_doubts(temperature: str) -> None:
    """Behind the first token that it does not know; rows that go on take the others along."""
    target = tiny_target(4, vocab_size=4000)
    engine = tiny_engine(target, tiny_draft(target))
    run = partial(ask, engine, [[1, 2, 3], [4, 5]], sampling=TEMPERATURES[temperature], seed=0, new=40)
    expected = run(VANILLA)
    scripts: dict[str, Script] = {
        "all know": lambda row, place: True,
        "one knows": lambda row, place: row == 1,
        "none knows": lambda row, place: False,
        "at times": lambda row, place: place % 7 not in (2, 5),
    }
    drafted: dict[str, list[int]] = {}
    for name, script in scripts.items():
        plain = run(ScriptedSeq(5, answers=answers_of(expected), script=script))
        method = ScriptedSeq(5, min_confidence=0.99, answers=answers_of(expected), script=script)
        asked = run(method)
        assert [one.tokens for one in asked] == [one.tokens for one in expected]
        assert [one.depths for one in asked] == [one.depths for one in plain], "only what is wrong is missing"
        drafted[name] = method.sizes
    assert set(drafted["all know"]) == {6}
    assert set(drafted["none knows"]) == {2}
    assert {2, 6} <= set(drafted["one knows"]) <= {2, 6}, "the one that knows ends first"
    assert {3, 4} <= set(drafted["at times"]) <= {2, 3, 4, 5}


@pytest.mark.parametrize("kind", ["chain", "tree", "magicdec"])
def test_a_row_that_ends_early_keeps_within_its_room(kind: str) -> None:
    """The longest row ends inside its first round, far past its limit, while the other goes on and on."""
    target = tiny_target(vocab_size=40)
    engine = tiny_engine(target, tiny_draft(target, max_lag=8), max_length=44, page_size=4)

    def asked(method: Method) -> list[Sequence]:
        long = Sequence([1, 2, 3] * 14, 2, seed=1, method=method)
        return [long, Sequence([4, 5], 42, seed=2, method=method)]

    expected = asked(VANILLA)
    engine.run(expected)
    answers = answers_of(expected)
    shapes = {"chain": (1,) * 8, "tree": (2, 4, 4, 4, 2, 2)}
    method: Method = MagicDec(gamma=8, sinks=0, window=100)
    if kind in shapes:
        method = ScriptedTree(shapes[kind], answers=answers)
    found = asked(method)
    engine.run(found)
    assert [one.tokens for one in found] == [one.tokens for one in expected]


@pytest.mark.parametrize(
    ("window", "max_nodes", "temperature"), [(6, None, 0.0), (9, None, 0.9), (9, 3, 0.0), (64, 4, 0.9)]
)
def test_a_chain_proposes_what_a_tree_one_node_wide_does(
    window: int, max_nodes: int | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes stand in the ring itself, and a tree's behind it."""
    target = tiny_target(3, vocab_size=10)
    config: dict[str, Any] = {"window": window, "max_lag": 8, "cross_layers": (0, 1), "final_norm": True}
    engine = tiny_engine(target, tiny_draft(target, std=0.4, **config))
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7], [8] * 30]
    run = partial(ask, engine, prompts, sampling=Sampling(temperature), new=40)
    expected = run(VANILLA)
    chain = run(Tree((1,) * 5, max_nodes))

    class AsTree(drafts._PlainDrafting):
        def __post_init__(self) -> None:
            self.chain = False
            super().__post_init__()

    monkeypatch.setattr(drafts, "_PlainDrafting", AsTree)
    as_tree = run(Tree((1,) * 5, max_nodes))
    for one, other, truth in zip(chain, as_tree, expected, strict=True):
        assert one.tokens == other.tokens == truth.tokens
        assert one.depths == other.depths
    if temperature:  # greedy, so small a target soon says one thing only, and the draft another
        assert sum(sum(one.accepted_by_depth[1:]) for one in chain) > 2, "or the ring never takes several"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"method": "seq", "gamma": 0}, "gamma is 0"),
    ({"method": "tree", "tree_shape": ()}, "tree_shape is empty"),
    ({"method": "tree", "tree_shape": (4, 0)}, r"tree_shape is \[4, 0\]"),
    ({"method": "tree", "tree_shape": (600,)}, "601 nodes"),
    ({"method": "tree", "tree_shape": (1,) * 9}, "a depth of 9"),
    ({"method": "tree", "max_nodes": 1}, "max_nodes is 1"),
    ({"method": "tree", "num_lookup": 65}, "num_lookup is 65"),
    ({"method": "seq", "min_confidence": 1.5}, "min_confidence is 1.5"),
    ({"method": "seq", "min_confidence": "high"}, "min_confidence is 'high'"),
    ({"method": "magicdec", "window": 0}, "window is 0"),
    ({"method": "seq", "acceptance": "hopeful"}, "'hopeful' is unknown"),
    ({"method": "best"}, "'best' is unknown; there are: auto, "),
    ({"gamma": 3}, "method 'auto' has no option 'gamma'; it is an option of .*seq"),
]


@pytest.mark.parametrize("drafting", ["ours"], indirect=True)
def test_bad_method_options_are_named(drafting: LongSpec) -> None:
    for options, named in BAD:
        with pytest.raises(UserError, match=named):
            drafting.generate("Hi", **options)


def test_a_method_that_needs_a_draft_says_so(tiny: LongSpec) -> None:
    with pytest.raises(UserError, match="'tree' needs a draft"):
        tiny.generate("Hi", method="tree")
