"""`auto`: decides by what rounds cost here and what sequences gain, and never changes a word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longspec import LongSpec
from longspec.decoding.methods import VANILLA, Auto, Lookup, Method, Seq, Tree
from longspec.decoding.methods.seq import MIN_CONFIDENCE
from longspec.decoding.sampling import Sampling
from longspec.engine.auto import Outlook, Policy, candidates, unmeasured
from longspec.engine.captures import Captures
from longspec.engine.costs import Costs, interpolate, known_costs, measure, timed_sizes
from longspec.engine.engine import Engine
from tests.decoding.scripted import (
    SCRIPTS,
    ScriptedSeq,
    answers_of,
    ask,
    tiny_draft,
    tiny_engine,
    tiny_target,
)

ACCEPTANCE = {"chain": [0.8, 0.6, 0.4, 0.3], "trees": {"4,8": [0.9, 0.7]}}
AUTO = Auto()
DOUBT = f":min_confidence={MIN_CONFIDENCE}"
"""What `auto` adds to chains."""
SEQ = Seq(4, min_confidence=MIN_CONFIDENCE)
# The seconds of chains, in vanilla steps.
CHAINS = {"seq:1": 1.1, "seq:3": 1.5, "seq:4": 1.9}


def policy(
    ratios: dict[str, float],
    acceptance: dict[str, Any] = ACCEPTANCE,
    drafting: bool = True,
    fused: bool = False,
) -> Policy:
    """By measurements of one row in vanilla steps; what is not named costs far too much."""
    draft = tiny_draft(tiny_target(), max_lag=4) if drafting else None
    methods = candidates(draft, acceptance, fused)
    assert set(ratios) <= {one.label.removesuffix(DOUBT) for one in methods}
    times = {one.label: {1: [(256, ratios.get(one.label.removesuffix(DOUBT), 99.0))]} for one in methods}
    return Policy(methods, acceptance, Costs({"vanilla": {1: [(256, 1.0)]}, **times}, methods))


def pick(made: Policy, run: int = 0, **changes: Any) -> Method:
    return made.pick([Outlook(0.0)], [run], **{"num_rows": 1, "context": 300} | changes)


def expects(outlook: Outlook, source: str, gained: float) -> float:
    """Tokens of a round that gains so much on average."""
    return 1 + outlook.shares[source] * (gained - 1)


def test_the_best_gain_for_its_cost_is_picked() -> None:
    assert Seq(gamma=2).gain(ACCEPTANCE) == pytest.approx(2.4)
    assert Tree(tree_shape=(4, 8)).gain(ACCEPTANCE) == pytest.approx(2.6)
    ratios = CHAINS | {"lookup:2": 1.1}
    assert pick(policy(ratios)) == SEQ
    assert pick(policy(ratios | {"tree:4x8": 1.2})) == Tree((4, 8))
    assert pick(policy(ratios | {"tree:4x8": 1.2}), max_nodes=4) == Seq(3, min_confidence=MIN_CONFIDENCE)


def test_a_chain_is_judged_by_the_tokens_that_it_drafts_before_it_ends() -> None:
    made = policy(CHAINS)
    assert SEQ.expected_length(ACCEPTANCE, 1.0) == pytest.approx(1 + 0.8 + 0.6 + 0.4)
    assert SEQ.expected_length(ACCEPTANCE, 0.5) == pytest.approx(1 + 0.9), "what is not accepted ends it"
    assert made.costs.seconds(SEQ, 1, 300, 2.0) == pytest.approx(1.3)
    assert made.costs.seconds(SEQ, 1, 300) == 1.9 == made.costs.seconds(SEQ, 1, 300, 4.0)
    dear = CHAINS | {"seq:3": 1.8, "seq:4": 2.5}
    assert pick(policy(dear)) == SEQ
    two = policy(dear).pick([Outlook(0.0)] * 2, [0, 0], 1, 300)
    assert two == Seq(1, min_confidence=MIN_CONFIDENCE), "of two rows, one is sure for longer"


def test_lookup_comes_before_drafting_where_there_is_a_match() -> None:
    ratios = CHAINS | {"lookup:2": 1.1, "lookup:4": 1.2, "lookup:7": 1.7}
    assert pick(policy(ratios)).name == "seq"
    assert pick(policy(ratios), run=3) == Lookup(4)
    assert pick(policy(ratios), run=8) == Lookup(7), "more tokens are likely after a longer run"
    assert pick(policy(ratios), run=2).name == "seq", "a short run is often chance"
    both = policy(ratios).pick([Outlook(0.0)] * 2, [3, 0], 1, 300)
    assert both.name == "seq", "the other has nothing to look up"


def test_what_would_lose_is_not_picked() -> None:
    dear = {"seq:1": 2.0, "seq:3": 3.9, "lookup:2": 1.2}
    assert pick(policy(dear)) == VANILLA
    assert pick(policy(dear), run=3).name == "lookup"
    assert pick(policy({"lookup:2": 1.1}, drafting=False), run=3).name == "lookup"
    assert pick(policy({"seq:1": 1.78})) == VANILLA, "a gain within what timing can tell is none"


def test_a_method_that_must_be_captured_first_has_to_pay_for_that() -> None:
    """In vanilla steps, a token of the tree takes 1.0 / 2.6, one of the chain 0.086 more."""
    made, tree = policy(CHAINS | {"tree:4x8": 1.0}), Tree((4, 8))
    assert pick(made) == tree
    assert pick(made, delays={tree: 0.08}) == tree
    assert pick(made, delays={tree: 0.09}) == SEQ
    two = made.pick([Outlook(0.0)] * 2, [0, 0], 1, 300, delays={tree: 0.09})
    assert two == tree, "two rows share the delay"
    late = dict.fromkeys(made.methods, 0.6)
    assert pick(made, delays=late) == VANILLA
    assert pick(made, delays=late | {VANILLA: 0.6}) == tree, "all must be captured"


@pytest.fixture
def capturing_engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that does what one on a GPU does with captured rounds; a CPU has no graphs, so that a replay
    does the work again."""

    def capture(works: list[Any], *_: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(replay=work) for work in works]

    monkeypatch.setattr("longspec.engine.device.capture", capture)
    engine = tiny_engine(tiny_target(), tiny_draft(tiny_target()))
    engine.device.captures = True
    return engine


def test_many_short_answers_pay_for_a_capture_that_none_of_them_pays_for(capturing_engine: Engine) -> None:
    """A vanilla round takes 1 ms, and drafting saves half a millisecond of each of an answer's 9 tokens. To
    capture takes 50 ms: what ten answers lose and the eleventh saves."""
    engine = capturing_engine
    chain, steps = Seq(3), {"vanilla": 1e-3, "seq:3": 1.4e-3}
    costs = Costs({label: {1: [(1, seconds)]} for label, seconds in steps.items()}, (chain,))
    engine.loop.policy = Policy((chain,), {"chain": [0.8, 0.6, 0.4]}, costs)
    (expected,) = ask(engine, [[1, 2, 3]], new=10)
    engine.device.capture_seconds = 0.05
    captured, drafted = engine.statistics.num_captures, list[bool]()
    for _ in range(14):
        (answer,) = ask(engine, [[1, 2, 3]], AUTO, new=10)
        assert answer.tokens == expected.tokens
        drafted.append(chain in answer.methods)
    assert 9 <= drafted.index(True) <= 11, drafted
    assert engine.statistics.num_captures == captured + 1


def test_rounds_that_lose_nothing_do_not_put_a_capture_off(capturing_engine: Engine) -> None:
    """A chain is 1.5% faster than vanilla, which is too little to take it, but vanilla is not captured. Then
    the chain is only two thirds as fast, and vanilla is captured when that has cost as much as a capture."""
    engine, chain = capturing_engine, Seq(3)
    ask(engine, [[1, 2, 3]], chain)
    engine.device.capture_seconds = 0.05
    captures = Captures(engine.device, engine.loop.fit)

    def pick(speed: float) -> Method:
        times = {"vanilla": 1e-3, "seq:3": 2.8e-3 / speed}
        costs = Costs({label: {1: [(1, seconds)]} for label, seconds in times.items()}, (chain,))
        made = Policy((chain,), {"chain": [0.8, 0.6, 0.4]}, costs)
        return captures.pick(made, ([Outlook(0.0)], None, 1, 300), None, False, False, num_left=9)

    assert all(pick(1.015) == chain for _ in range(500))
    assert 20 < [pick(1 / 1.5) for _ in range(60)].index(VANILLA) < 40


@pytest.mark.parametrize("is_told", [True, False])
def test_room_for_a_large_tree_is_made_before_anything_is_captured(
    capturing_engine: Engine, is_told: bool
) -> None:
    engine, large = capturing_engine, Tree((8, 16, 16, 16, 16))
    engine.prepare(methods=[large] if is_told else [])
    (expected,) = ask(engine, [[1, 2, 3]])
    captured = engine.statistics.num_captures
    (answer,) = ask(engine, [[1, 2, 3]], large)
    assert answer.tokens == expected.tokens
    assert ask(engine, [[1, 2, 3]])[0].tokens == expected.tokens
    recaptured = engine.statistics.num_captures - captured > 1
    assert recaptured != is_told, "to make room later drops what is captured"


def test_an_outlook_follows_what_is_observed_and_comes_back() -> None:
    made = policy(CHAINS)
    outlook = Outlook(0.0)
    assert expects(outlook, "draft", made.gain(SEQ)) == pytest.approx(3.1)
    assert expects(Outlook(0.7), "draft", 2.4) < 2.1, "a temperature makes drafts worse"
    for _ in range(40):
        made.learn(outlook, SEQ, 1, None)
    assert expects(outlook, "draft", 2.4) < 1.05
    assert made.pick([outlook], [0], 1, 300) == VANILLA
    rounds = 0
    while made.pick([outlook], [0], 1, 300) == VANILLA:
        made.learn(outlook, VANILLA, 1, None)
        rounds += 1
    assert 20 < rounds < 200, "what lost is tried again, but not soon"
    for _ in range(40):
        made.learn(outlook, SEQ, 4, None)
    assert expects(outlook, "draft", 2.4) > 2.5
    # Lookup is judged by the rounds in which there was something to look up, and more was expected after a
    # longer run.
    for run, emitted, falls in ((0, 1, False), (2, 1, True), (2, 2, False), (8, 2, True)):
        before = expects(outlook, "lookup", 2.0)
        made.learn(outlook, Lookup(2), emitted, run)
        assert (expects(outlook, "lookup", 2.0) < before) == falls


def test_rows_decide_together() -> None:
    made, good, bad = policy({"seq:3": 1.9}), Outlook(0.0), Outlook(0.0)
    for _ in range(40):
        made.learn(bad, SEQ, 1, None)
    assert made.pick([good, good], [0] * 2, 1, 300).name == "seq"
    assert made.pick([good, good, bad], [0] * 3, 1, 300).name == "seq"
    assert made.pick([good, bad, bad], [0] * 3, 1, 300) == VANILLA


def test_an_unmeasured_draft_is_assumed_to_be_middling() -> None:
    assert Seq(gamma=2).gain({}) == pytest.approx(1 + 0.6 + 0.36)
    assert pick(policy(CHAINS, acceptance={})).name == "seq"


def test_while_nothing_is_measured_plain_rounds_draft_a_chain() -> None:
    target = tiny_target()
    draft = tiny_draft(target, max_lag=3)
    assert pick(tiny_engine(target, draft).policy) == Seq(3, min_confidence=MIN_CONFIDENCE)
    assert unmeasured(draft, fused=True) == (Tree((4, 16, 16)),)
    assert unmeasured(None, fused=False) == unmeasured(None, fused=True) == (Lookup(),)


def test_what_was_not_measured_follows_from_what_was() -> None:
    def tree(nodes: int, acceptance: dict[str, Any], depth: int = 4) -> float:
        return Tree((4, 16, 16, 16)[:depth], nodes).gain(acceptance)

    chain = {"chain": [0.7, 0.49]}
    alone = Seq(gamma=4).gain(chain)
    assert alone == pytest.approx(sum(0.7**power for power in range(5)))
    assert tree(5, chain) == pytest.approx(alone), "as many nodes as a chain"
    assert alone < tree(8, chain) < tree(16, chain) < tree(53, chain) < 5
    measured = [0.9, 0.8, 0.72, 0.6]
    trees = {"4,16,16,16": measured, "4,16,16,16/16": [0.85, 0.7, 0.6, 0.5]}
    known = chain | {"trees": trees}
    assert tree(53, known) == pytest.approx(1 + sum(measured))
    assert tree(16, known, depth=2) == pytest.approx(1 + 0.85 + 0.7)
    assert alone < tree(8, known) < tree(16, known) < tree(32, known) < tree(53, known)
    # What lookup adds to a tree is measured with that tree, or taken from the others.
    found = [0.95, 0.88, 0.8, 0.7, 0.4]
    both = chain | {"trees": trees | {"4,16,16,16/16+12": found}}
    assert Tree((4, 16, 16, 16), 16, 12).gain(both) == pytest.approx(1 + sum(found))
    factor = sum(found) / (0.85 + 0.7 + 0.6 + 0.5)
    assert Tree((4, 16, 16, 16), 32, 12).gain(both) == pytest.approx(1 + factor * (tree(32, known) - 1))
    assert Tree((4, 16, 16, 16), 16, 12).gain(known) == tree(16, known)
    assert tree(32, both) == tree(32, known)
    draft = tiny_draft(tiny_target(), max_lag=4)
    assert candidates(draft, both, fused=True) == candidates(draft, known, fused=True)
    # A draft whose trees gain nothing over its chain is not thought to gain from other trees.
    poor = chain | {"trees": {"4,16,16,16": [0.7**power for power in (1, 2, 3, 4)]}}
    assert tree(32, poor) == pytest.approx(alone)


def test_fewer_nodes_as_the_context_and_the_rows_grow() -> None:
    draft = tiny_draft(tiny_target(), max_lag=8)
    acceptance = {"chain": [0.7, 0.5, 0.36, 0.25]}
    methods = candidates(draft, acceptance, fused=True)
    assert [one.label for one in methods] == [
        "tree:4x4x4x4@8+12",
        "tree:4x8x8x8x8@16+12",
        "tree:4x16x16x16x16x16@32+12",
        "tree:4x16x16x16x16x16x16x16@64+12",
    ]
    sizes = {one.label: (one.num_nodes, len(one.shape or ())) for one in (VANILLA, *methods)}
    # Milliseconds: what reading the weights takes, and what follows the nodes.
    times = {
        name: {
            rows: [
                (at, 8 + depth * 0.4 + rows * nodes / 100 + at / 16384 * (1 + nodes / 16))
                for at in (1024, 65536)
            ]
            for rows in (1, 8, 64)
        }
        for name, (nodes, depth) in sizes.items()
    }
    made = Policy(methods, acceptance, Costs(times, methods))

    def nodes(rows: int, context: int) -> int:
        return made.pick([Outlook(0.0)] * rows, None, rows, context).num_nodes

    for found in ([nodes(1, at) for at in (1024, 65536, 524288)], [nodes(rows, 1024) for rows in (1, 8, 64)]):
        assert found == sorted(found, reverse=True)
        assert found[0] == 64 > found[-1]


def test_costs_lie_on_lines_and_what_rows_cost_is_derived() -> None:
    points = [(256, 2.0), (2048, 4.0), (8192, 3.0)]
    assert [interpolate(points, at) for at in (1, 256, 1152, 2048, 8192, 10**6)] == [2, 2, 3, 4, 3, 3]
    one = {VANILLA: 1.0, Seq(2): 1.5, Lookup(2): 1.2}
    costs = Costs(
        {method.label: {1: [(256, seconds)]} for method, seconds in one.items()}, (Seq(2), Lookup(2))
    )
    assert costs.seconds(Seq(2), 1, 300) == 1.5
    many = [costs.seconds(method, 4, 300) for method in one]
    assert many[0] < many[2] < many[1]
    assert Costs({}, ()).seconds(VANILLA, 1, 1) == 1 < Costs({}, ()).seconds(Seq(2), 1, 1)


def measured_engine(**changes: Any) -> Engine:
    target = tiny_target(max_length=4096, **changes)
    return tiny_engine(target, tiny_draft(target), max_length=2600, num_pages=200, max_rows=2)


def test_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    engine = measured_engine()
    (before,) = ask(engine, [[1, 2, 3]], AUTO)

    def costs(one: Engine) -> Costs:
        with one.paused() as device:
            return known_costs(device, one.candidates)

    for _ in range(3):  # the last of which is believed even if this machine is busy
        first = costs(engine)
    assert {"vanilla", "lookup:4", "seq:3" + DOUBT, "tree:4x4x4x4@8"} <= set(first.times)
    for times in first.times.values():
        assert [context for context, _ in times[1]] == [256, 2048]
        assert all(seconds > 0 for _, seconds in times[1])
    assert costs(engine) == costs(measured_engine()) == first
    engine.adopt(first)
    assert ask(engine, [[1, 2, 3]], AUTO)[0].tokens == before.tokens, "measuring leaves nothing behind"
    (file,) = (tmp_path / "calibration").iterdir()
    file.write_text("{ damaged")
    costs(engine)
    assert "vanilla" in file.read_text()
    costs(measured_engine(num_layers=1))
    assert len(list((tmp_path / "calibration").iterdir())) == 2, "another model is measured for itself"


def test_every_method_is_timed_where_it_is_asked_for() -> None:
    engine = measured_engine()
    with engine.paused() as device:
        found = measure(device, engine.candidates)
        assert {label for label, *_ in found} == {"vanilla", *(one.label for one in engine.candidates)}
        assert {num_rows for _, num_rows, *_ in found} == set(timed_sizes(device))
        assert not bool(device.slots.running.any())
        assert device.slots.ring is not None
        assert bool((device.slots.ring.positions == -1).all())


@pytest.mark.full
def test_what_others_disturb_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    engine, found = tiny_engine(tiny_target(num_layers=1, max_length=4096), max_length=900), []
    command = (sys.executable, "-c", "while True: pass")
    busy = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        time.sleep(0.5)  # until they run
        for _ in range(4):
            with engine.paused() as device:
                known_costs(device, engine.candidates)
            (file,) = (tmp_path / "calibration").iterdir()
            found.append(json.loads(file.read_text()))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert [one["tries"] for one in found] == [1, 2, 3, 3]
    assert not any(one["is_quiet"] for one in found)
    vanilla = [one["times"][0][3] for one in found]
    assert vanilla == sorted(vanilla, reverse=True), "the least disturbed counts"
    assert found[3] == found[2]


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_loses_rests_and_no_word_changes(script: str) -> None:
    """Rounds of a chain of 3 that cost 1.4 steps, by what the draft knows."""
    target = tiny_target(4, vocab_size=40)
    draft = tiny_draft(target)
    engine = tiny_engine(target, draft, max_length=256)
    prompts, new = [[1, 2, 3], [4, 5]], 110
    expected = ask(engine, prompts, sampling=Sampling(0.9), new=new)
    chain = ScriptedSeq(3, answers=answers_of(expected), script=SCRIPTS[script])
    times = {"vanilla": {1: [(1, 1.0)], 2: [(1, 1.0)]}, "seq:3": {1: [(1, 1.4)], 2: [(1, 1.4)]}}
    engine.loop.policy = Policy((chain,), {"chain": [0.8, 0.6, 0.4]}, Costs(times, (chain,)))
    asked = ask(engine, prompts, AUTO, Sampling(0.9), new=new)
    assert [one.tokens for one in asked] == [one.tokens for one in expected]
    drafted = [one.methods[chain] / one.num_rounds for one in asked]
    if script == "adversary":
        assert all(0 < share < 0.25 for share in drafted), "most rounds are the target's alone"
    else:
        assert all(share > 0.9 for share in drafted)
    cost = max(one.num_rounds + 0.4 * one.methods[chain] for one in asked)
    assert cost < 1.12 * new


def test_auto_is_the_default_and_says_what_vanilla_says(smollm2: LongSpec) -> None:
    text = "Copy this list: apple, pear, plum, fig, apple, pear, plum, fig, apple, pear, plum, fig."
    expected = smollm2.generate(text, method="vanilla", max_new_tokens=40)
    answer = smollm2.generate(text, max_new_tokens=40)
    assert answer.method in ("vanilla", "seq", "tree", "lookup")
    assert answer.token_ids == expected.token_ids
