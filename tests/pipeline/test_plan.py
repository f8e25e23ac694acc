"""The plan follows the target, the device and the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.shapes import shape_named
from longspec.config import DraftConfig
from longspec.errors import UserError
from longspec.pipeline.card import plan_text
from longspec.pipeline.plan import DeviceFacts, Plan, make_plan

SMOLLM2, QWEN = shape_named("smollm2-135m"), shape_named("qwen2.5-0.5b")
LLAMA = replace(shape_named("llama3-8b"), max_length=131072)
H200 = DeviceFacts("cuda", "NVIDIA H200", 139 * 10**9, 7.8e14, 4e12, 2)
LAPTOP = DeviceFacts("cpu", "a laptop", 8 * 10**9, 8e10, 1e10, 4)


def lengths(plan: Plan) -> list[int]:
    return [stage.seq_length for stage in plan.stages]


def test_the_recipe_follows_the_target() -> None:
    for config, longest in ((SMOLLM2, 8192), (QWEN, 32768), (LLAMA, 131072)):
        plan = make_plan("x", config, H200, seconds=8 * 3600)
        assert plan == make_plan("x", config, H200, seconds=8 * 3600), "nothing but the arguments decides"
        assert lengths(plan) == [1024, longest], "the long stage covers the whole context"
        assert (plan.num_cross_layers, plan.cross_layers) == (5, None), "the target's weights decide which"
        assert "reads the KV of 5 layers, chosen by measurement" in plan_text(plan)
        assert [stage.batch * stage.seq_length for stage in plan.stages] == [16384, max(65536, longest)]
        assert plan.memory < H200.free_memory
    few = make_plan("x", replace(SMOLLM2, num_layers=2), H200, tokens=10**6)
    assert few.num_cross_layers == 2, "all that there are"
    # Less memory: fewer sequences at a time, and where one does not fit, shorter ones.
    small = replace(H200, free_memory=32 * 10**9)
    plan = make_plan("x", LLAMA, small, seconds=8 * 3600)
    assert plan.stages[0].micro_batch < 16
    assert lengths(plan)[1] < 131072
    assert plan.memory < small.free_memory
    with pytest.raises(UserError, match=r"x and a draft take more than the 8\.0 GB that are free"):
        make_plan("x", LLAMA, LAPTOP, tokens=10**6)


def test_a_budget_is_divided_and_tokens_are_kept() -> None:
    hour, day = (make_plan("x", QWEN, H200, seconds=seconds) for seconds in (3600, 86400))
    assert (hour.seconds, hour.is_limited) == (3600, True)
    planned = sum(one.seconds for one in hour.written) + sum(stage.seconds for stage in hour.stages)
    assert planned == pytest.approx(0.85 * 3600, rel=0.05)
    assert day.tokens > 20 * hour.tokens
    plan = make_plan("x", QWEN, H200, tokens=300_000_000)
    assert plan.tokens == pytest.approx(300_000_000, abs=10)
    assert not plan.is_limited
    base = plan.stages[0]
    seen = sum(one.tokens for one in plan.written if one.name in base.datasets)
    assert base.tokens == pytest.approx(4 * seen, rel=0.01)
    # Too little for long sequences, and then for sequences of 1,024 tokens.
    assert lengths(make_plan("x", SMOLLM2, LAPTOP, tokens=10_000)) == [128, 256]
    with pytest.raises(UserError, match=r"tokens is 100; at least 8,192 are needed"):
        make_plan("x", SMOLLM2, LAPTOP, tokens=100)
    with pytest.raises(UserError, match="a budget of 5 seconds is too short on a laptop"):
        make_plan("x", SMOLLM2, LAPTOP, seconds=5)


@pytest.mark.parametrize("seconds", [60, 75, 90, 300, 900, 3600])
def test_no_plan_takes_longer_than_its_budget(seconds: int) -> None:
    """Also where a little more time allows sequences of another length."""
    small = DeviceFacts("cuda", "a small GPU", 24 * 10**9, 1.5e14, 9e11, 2)
    plan = make_plan("x", LLAMA, small, seconds=seconds)
    planned = sum(one.seconds for one in plan.written) + sum(stage.seconds for stage in plan.stages)
    assert 0.5 * seconds < planned <= 0.86 * seconds


def test_a_target_without_a_template_continues_and_a_draft_goes_on() -> None:
    plan = make_plan("x", QWEN, H200, has_template=False, tokens=10**8)
    assert {one.mode for one in plan.written} == {"documents"}
    assert plan.tokens == pytest.approx(10**8, abs=10)
    assert all(one.given_tokens + 32 <= one.seq_length for one in plan.written)
    published = DraftConfig()
    again = make_plan("x", QWEN, H200, tokens=10**8, from_draft=published)
    assert (again.cross_layers, again.max_lag) == ([23], published.max_lag)
    assert "reads the KV of layers 23; lags" in plan_text(again)
    assert again.stages[0].lr < plan.stages[0].lr
