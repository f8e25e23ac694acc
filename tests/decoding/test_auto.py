"""`auto`: plans by measurement, pauses what loses, and never changes a word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longspec import LongSpec
from longspec.calibration import plan_for
from longspec.config import DraftConfig
from longspec.decoding.auto import Costs, Plan, candidates, gain
from longspec.decoding.choose import Sampling
from longspec.decoding.guard import Account, Guarded, Prices
from longspec.decoding.loop import DecodeState, Method, decode, start
from longspec.decoding.methods.make import MethodOptions
from longspec.decoding.methods.vanilla import Vanilla
from longspec.decoding.row import Row
from longspec.decoding.tree import TokenTree
from longspec.models.draft import DraftHead, GlideDraft
from tests.decoding.scripted import SCRIPTS, Script, ScriptedGlide, tiny_target

ACCEPTANCE = {"chain": [0.8, 0.6, 0.4, 0.3], "trees": {"4,8": [0.9, 0.7]}}


def costs(**ratios: float) -> Costs:
    """Measurements by name, spaces for underscores, in vanilla steps."""
    named = {"vanilla": 1.0} | {name.replace("_", " "): ratio for name, ratio in ratios.items()}
    return Costs({Costs.key(name, 256, 1): ratio for name, ratio in named.items()})


def plan(measured: Costs, acceptance: dict[str, Any] = ACCEPTANCE, drafting: bool = True) -> Plan:
    draft = GlideDraft(tiny_target().config, DraftConfig(max_lag=4)) if drafting else None
    return Plan(measured, acceptance, candidates(draft, acceptance))


def test_the_best_gain_for_its_cost_is_picked() -> None:
    assert gain(MethodOptions("seq", gamma=2), ACCEPTANCE) == pytest.approx(2.4)
    assert gain(MethodOptions("tree", tree_shape=(4, 8)), ACCEPTANCE) == pytest.approx(2.6)
    measured = costs(seq_1=1.1, seq_2=1.2, seq_3=1.5, lookup_2=1.1)
    options, prices = plan(measured).pick(300, 1)
    assert (options.method, options.gamma) == ("seq", 2)
    assert [prices(nodes) for nodes in (1, 2, 3, 4)] == [1, 1.1, 1.2, 1.5]
    tree = Costs(measured.seconds | {Costs.key("tree 4,8", 256, 1): 1.25})
    assert plan(tree).pick(300, 1)[0].tree_shape == (4, 8)


def test_what_would_lose_is_not_picked() -> None:
    dear = costs(seq_1=2.0, seq_2=2.9, lookup_2=1.2, lookup_4=1.4, lookup_7=1.7)
    options, prices = plan(dear).pick(300, 1)
    assert (options.method, options.gamma) == ("lookup", 4)
    assert [prices(nodes) for nodes in (1, 3, 4, 5)] == [1, 1.2, pytest.approx(1.3), 1.4]
    assert plan(costs(seq_1=2.0, lookup_2=1.7)).pick(300, 1)[0].method == "vanilla"
    assert plan(costs(lookup_2=1.1), drafting=False).pick(300, 1)[0].method == "lookup"


def test_an_unmeasured_draft_is_assumed_to_be_middling() -> None:
    assert gain(MethodOptions("seq", gamma=2), {}) == pytest.approx(1 + 0.6 + 0.36)
    assert plan(costs(seq_2=1.2), acceptance={}).pick(300, 1)[0].method == "seq"


# Rounds of a chain of 3 by what its draft knows: nothing, everything, half, or only what comes later.
KNOWN: dict[str, Script] = SCRIPTS | {"late": lambda row, place: place > 40}


@pytest.mark.parametrize("script", KNOWN)
def test_the_guard_rests_what_loses_and_changes_nothing(script: str) -> None:
    target, new = tiny_target(4, vocab_size=40), 150
    prompts = [[1, 2, 3], [4, 5]]

    def decoded(method: Method) -> list[Row]:
        rows = [Row(prompt, 9, new) for prompt in prompts]
        for _ in decode(start(target, target.new_cache(2, 200), rows, Sampling(0.9)), method):
            pass
        return rows

    answers = decoded(Vanilla())
    texts = [row.tokens for row in answers]
    alone = decoded(ScriptedGlide(target, texts, KNOWN[script], (1, 1, 1)))
    inner = ScriptedGlide(target, texts, KNOWN[script], (1, 1, 1))
    drafted, propose = 0, inner.propose

    def counted(state: DecodeState) -> TokenTree:
        nonlocal drafted
        drafted += 1
        return propose(state)

    inner.propose = counted  # type: ignore[method-assign]
    rows = decoded(Guarded(inner, Prices(((4, 1.4),))))
    assert [row.tokens for row in rows] == texts
    rounds, steps = rows[0].num_rounds, new - 1
    cost = rounds + 0.4 * drafted
    assert cost <= steps * (1 + Account.SHARE) + Account.START + 0.4, "never slower, but for what it may lose"
    if script == "adversary":
        assert 10 < drafted < 20, "most rounds of a useless draft are the target's alone; it is tried again"
    elif script == "late":
        assert rounds < 1.2 * alone[0].num_rounds, "it is soon tried again where it has become good"
    else:
        assert drafted == rounds == alone[0].num_rounds


def test_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    target = tiny_target(max_length=4096)
    draft = GlideDraft(target.config, DraftConfig(max_lag=5))
    draft.initialise(torch.Generator().manual_seed(0))
    drafting = (draft, DraftHead(target, None))
    first = plan_for(target, drafting, {}, 4096, progress=False)
    assert all(seconds > 0 for seconds in first.costs.seconds.values())
    assert {"vanilla @256 x1", "vanilla @2048 x1", "vanilla @256 x4"} <= set(first.costs.seconds)
    assert plan_for(target, drafting, {}, 4096, progress=False) == first
    (file,) = (tmp_path / "calibration").iterdir()
    file.write_text("{ damaged")
    plan_for(target, drafting, {}, 4096, progress=False)
    assert "vanilla" in file.read_text()
    # another model is measured for itself
    plan_for(tiny_target(num_layers=1, max_length=4096), None, {}, 300, progress=False)
    assert len(list((tmp_path / "calibration").iterdir())) == 2


def test_auto_is_the_default_and_says_what_vanilla_says(smollm2: LongSpec) -> None:
    text = "Copy this list: apple, pear, plum, fig, apple, pear, plum, fig, apple, pear, plum, fig."
    expected = smollm2.generate(text, method="vanilla", max_new_tokens=40)
    for model in (smollm2, LongSpec(replace(smollm2.engine, plan=None))):
        answer = model.generate(text, max_new_tokens=40)
        assert answer.method in ("lookup", "vanilla")
        assert answer.token_ids == expected.token_ids
