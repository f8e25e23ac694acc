"""A budget of time is divided between the phases that are left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.shapes import shape_named
from longspec.pipeline.plan import DeviceFacts, make_plan
from longspec.pipeline.run import Phase, Schedule


def test_what_one_phase_saves_the_later_ones_may_use(tmp_path: Path) -> None:
    device = DeviceFacts("cuda", "NVIDIA H200", 139 * 10**9, 7.8e14, 4e12, 2)
    plan = make_plan("x", shape_named("smollm2-135m"), device, seconds=100)
    allowed: dict[str, float | None] = {}

    def phase(name: str, planned: float, taken: float) -> Phase:
        def run(seconds: float | None) -> None:
            time.sleep(taken)
            allowed[name] = seconds

        return Phase(name, planned, lambda: name in allowed, run)

    phases = [phase("prepare", 0, 1), phase("write", 45, 0), phase("train", 40, 0), phase("measure", 5, 0)]
    Schedule(tmp_path, plan, lambda line: None).run(phases[:1])
    # Another process goes on: the second of preparing counts, and writing takes no time at all.
    Schedule(tmp_path, plan, lambda line: None).run(phases)
    assert allowed == {
        "prepare": None,
        "write": pytest.approx(0.9 * 99 * 45 / 90, rel=0.05),
        "train": pytest.approx(0.9 * 99 * 40 / 45, rel=0.05),
        "measure": pytest.approx(0.9 * 99, rel=0.05),
    }
