"""`auto`: decides by what rounds cost here and what sequences gain, and never changes a word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from longspec import LongSpec
from longspec.decoding.choose import Sampling
from longspec.decoding.expected import gain, num_nodes
from longspec.decoding.methods.make import MethodOptions
from longspec.engine.auto import VANILLA, Outlook, Policy, candidates
from longspec.engine.costs import Costs, Times, known_costs, measure, on_line, places
from longspec.engine.engine import Engine
from tests.decoding.scripted import (
    SCRIPTS,
    ScriptedGlide,
    answers_of,
    ask,
    tiny_draft,
    tiny_engine,
    tiny_target,
)

ACCEPTANCE = {"chain": [0.8, 0.6, 0.4, 0.3], "trees": {"4,8": [0.9, 0.7]}}
AUTO = MethodOptions("auto")


def policy(
    ratios: dict[str, float],
    acceptance: dict[str, Any] = ACCEPTANCE,
    drafting: bool = True,
    fused: bool = False,
) -> Policy:
    """By measurements of one row in vanilla steps; what is not named costs far too much."""
    draft = tiny_draft(tiny_target(), max_lag=4) if drafting else None
    options = candidates(draft, acceptance, fused)
    times = {name: {1: [(256, ratios.get(name, 99.0))]} for name in options}
    return Policy(options, acceptance, Costs({"vanilla": {1: [(256, 1.0)]}, **times}, options))


def pick(made: Policy, match: bool = False, **changes: Any) -> MethodOptions:
    return made.pick([Outlook(0.0)], [match], **{"num_rows": 1, "context": 300} | changes)


def test_the_best_gain_for_its_cost_is_picked() -> None:
    assert gain(MethodOptions("seq", gamma=2), ACCEPTANCE) == pytest.approx(2.4)
    assert gain(MethodOptions("tree", tree_shape=(4, 8)), ACCEPTANCE) == pytest.approx(2.6)
    ratios = {"seq 1": 1.1, "seq 2": 1.2, "seq 3": 1.5, "lookup 2": 1.1}
    options = pick(policy(ratios))
    assert (options.method, options.gamma, options.min_confidence) == ("seq", 2, 0.2)
    assert pick(policy(ratios | {"tree 4,8": 1.25})).tree_shape == (4, 8)
    assert pick(policy(ratios | {"tree 4,8": 1.25}), max_nodes=4).method == "seq"


def test_lookup_comes_before_drafting_where_there_is_a_match() -> None:
    ratios = {"seq 2": 1.2, "lookup 2": 1.1, "lookup 4": 1.2, "lookup 7": 2.7}
    assert pick(policy(ratios)).method == "seq"
    found = pick(policy(ratios), match=True)
    assert (found.method, found.gamma) == ("lookup", 4)
    both = policy(ratios).pick([Outlook(0.0)] * 2, [True, False], 1, 300)
    assert both.method == "seq", "the other has nothing to look up"


def test_what_would_lose_is_not_picked() -> None:
    dear = {"seq 1": 2.0, "seq 2": 2.9, "lookup 2": 1.2}
    assert pick(policy(dear)) == VANILLA
    assert pick(policy(dear), match=True).method == "lookup"
    assert pick(policy({"lookup 2": 1.1}, drafting=False), match=True).method == "lookup"
    assert pick(policy({"seq 2": 2.38})) == VANILLA, "a gain within what timing can tell is none"


def test_an_outlook_follows_what_is_observed_and_comes_back() -> None:
    made = policy({"seq 2": 1.2})
    seq = made.options["seq 2"]
    outlook = Outlook(0.0)
    assert outlook.expects("draft", made.gain(seq)) == pytest.approx(2.4)
    assert Outlook(0.7).expects("draft", 2.4) < 2.1, "a temperature makes drafts worse"
    for _ in range(40):
        made.learn(outlook, seq, 1, None)
    assert outlook.expects("draft", 2.4) < 1.05
    assert made.pick([outlook], [False], 1, 300) == VANILLA
    rounds = 0
    while made.pick([outlook], [False], 1, 300) == VANILLA:
        made.learn(outlook, VANILLA, 1, None)
        rounds += 1
    assert 20 < rounds < 200, "what lost is tried again, but not soon"
    for _ in range(40):
        made.learn(outlook, seq, 3, None)
    assert outlook.expects("draft", 2.4) > 2.5
    # Lookup is judged by the rounds in which there was something to look up.
    lookup = made.options["lookup 2"]
    for match in (False, True):
        before = outlook.expects("lookup", 2.0)
        made.learn(outlook, lookup, 1, match)
        assert (outlook.expects("lookup", 2.0) < before) == match


def test_rows_decide_together() -> None:
    made, good, bad = policy({"seq 2": 1.5}), Outlook(0.0), Outlook(0.0)
    for _ in range(40):
        made.learn(bad, made.options["seq 2"], 1, None)
    assert made.pick([good], [False], 1, 300).method == "seq"
    assert made.pick([good, good, bad], [False] * 3, 1, 300).method == "seq"
    assert made.pick([good, bad, bad], [False] * 3, 1, 300) == VANILLA


def test_an_unmeasured_draft_is_assumed_to_be_middling() -> None:
    assert gain(MethodOptions("seq", gamma=2), {}) == pytest.approx(1 + 0.6 + 0.36)
    assert pick(policy({"seq 2": 1.2}, acceptance={})).method == "seq"


def test_what_was_not_measured_follows_from_what_was() -> None:
    def tree(nodes: int, acceptance: dict[str, Any], depth: int = 4) -> float:
        return gain(MethodOptions("tree", tree_shape=(4, 16, 16, 16)[:depth], max_nodes=nodes), acceptance)

    chain = {"chain": [0.7, 0.49]}
    alone = gain(MethodOptions("seq", gamma=4), chain)
    assert alone == pytest.approx(sum(0.7**power for power in range(5)))
    assert tree(5, chain) == pytest.approx(alone), "as many nodes as a chain"
    assert alone < tree(8, chain) < tree(16, chain) < tree(53, chain) < 5
    measured = [0.9, 0.8, 0.72, 0.6]
    known = chain | {"trees": {"4,16,16,16": measured, "4,16,16,16/16": [0.85, 0.7, 0.6, 0.5]}}
    assert tree(53, known) == pytest.approx(1 + sum(measured))
    assert tree(16, known, depth=2) == pytest.approx(1 + 0.85 + 0.7)
    assert alone < tree(8, known) < tree(16, known) < tree(32, known) < tree(53, known)
    # A draft whose trees gain nothing over its chain is not thought to gain from other trees.
    poor = chain | {"trees": {"4,16,16,16": [0.7**power for power in (1, 2, 3, 4)]}}
    assert tree(32, poor) == pytest.approx(alone)


def test_fewer_nodes_as_the_context_and_the_rows_grow() -> None:
    draft = tiny_draft(tiny_target(), max_lag=8)
    acceptance = {"chain": [0.7, 0.5, 0.36, 0.25]}
    options = candidates(draft, acceptance, fused=True)
    assert list(options) == [
        "tree 4,4,4,4/8",
        "tree 4,8,8,8,8/16",
        "tree 4,16,16,16,16,16/32",
        "tree 4,16,16,16,16,16,16,16/64",
    ]
    sizes = {"vanilla": (1, 0)} | {n: (num_nodes(one), len(one.tree_shape)) for n, one in options.items()}
    # Milliseconds: what reading the weights takes, and what follows the nodes.
    times: Times = {
        name: {
            rows: [
                (at, 8 + depth * 0.4 + rows * nodes / 100 + at / 16384 * (1 + nodes / 16))
                for at in (1024, 65536)
            ]
            for rows in (1, 8, 64)
        }
        for name, (nodes, depth) in sizes.items()
    }
    made = Policy(options, acceptance, Costs(times, options))

    def nodes(rows: int, context: int) -> int:
        return num_nodes(made.pick([Outlook(0.0)] * rows, None, rows, context))

    for found in ([nodes(1, at) for at in (1024, 65536, 524288)], [nodes(rows, 1024) for rows in (1, 8, 64)]):
        assert found == sorted(found, reverse=True)
        assert found[0] == 64 > found[-1]


def test_costs_lie_on_lines_and_what_rows_cost_is_derived() -> None:
    points = [(256, 2.0), (2048, 4.0), (8192, 3.0)]
    assert [on_line(points, at) for at in (1, 256, 1152, 2048, 8192, 10**6)] == [2, 2, 3, 4, 3, 3]
    options = {"seq 2": MethodOptions("seq", gamma=2), "lookup 2": MethodOptions("lookup", gamma=2)}
    one = {"vanilla": 1.0, "seq 2": 1.5, "lookup 2": 1.2}
    costs = Costs({name: {1: [(256, seconds)]} for name, seconds in one.items()}, options)
    assert costs.seconds("seq 2", 1, 300) == 1.5
    many = [costs.seconds(name, 4, 300) for name in one]
    assert many[0] < many[2] < many[1]
    assert Costs({}, {}).seconds("vanilla", 1, 1) == 1 < Costs({}, {}).seconds("seq 2", 1, 1)


def measured_engine(**changes: Any) -> Engine:
    target = tiny_target(max_length=4096, **changes)
    return tiny_engine(target, tiny_draft(target), max_length=2600, num_pages=200, max_rows=2)


def test_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    engine = measured_engine()
    (before,) = ask(engine, [[1, 2, 3]], AUTO)

    def costs(one: Engine) -> Costs:
        with one.paused() as device:
            return known_costs(device, one.candidates, one.width)

    for _ in range(3):  # the last of which is believed even if this machine is busy
        first = costs(engine)
    assert {"vanilla", "lookup 4", "seq 4", "tree 4,4,4,4/8"} <= set(first.times)
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
        found = measure(device, engine.candidates, engine.width)
        assert set(found) == {"vanilla", *engine.candidates}
        assert all(set(by) == set(places(device)) for by in found.values())
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
                known_costs(device, engine.candidates, engine.width)
            (file,) = (tmp_path / "calibration").iterdir()
            found.append(json.loads(file.read_text()))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert [one["tries"] for one in found] == [1, 2, 3, 3]
    assert not any(one["is_quiet"] for one in found)
    vanilla = [one["times"]["vanilla"]["1"][0][1] for one in found]
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
    chain = MethodOptions("seq", gamma=3)
    options = {"seq 3": chain}
    costs = Costs(
        {"vanilla": {1: [(1, 1.0)], 2: [(1, 1.0)]}, "seq 3": {1: [(1, 1.4)], 2: [(1, 1.4)]}}, options
    )
    engine.policy = Policy(options, {"chain": [0.8, 0.6, 0.4]}, costs)
    engine._methods[(chain, False)] = ScriptedGlide(draft, answers_of(expected), SCRIPTS[script], (1, 1, 1))
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
