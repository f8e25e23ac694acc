"""The documented command that goes from nothing to a draft on a CPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.train.tiny import no_launcher

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.full
def test_train_tiny_makes_a_draft_better_than_an_untrained_one(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / "train-tiny"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=no_launcher())
    assert result.returncode == 0, result.stdout + result.stderr
    lines = (tmp_path / "smollm2_cpu_tiny" / "base" / "metrics.jsonl").read_text().splitlines()
    taus = [line["eval_tau"] for line in map(json.loads, lines) if "eval_tau" in line]
    assert taus[0] < 1.1 < 1.25 < taus[-1]
    card = (tmp_path / "smollm2-tiny-draft" / "README.md").read_text()
    assert all(f"| {stage} |" in card for stage in ("base", "long", "cot"))
    assert "PSF-2.0" in card
    assert "seq:2, tau" in result.stderr
