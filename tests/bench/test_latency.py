"""What steps and rounds cost can be measured anywhere; the figures follow from each other."""

from __future__ import annotations

import pytest

from longspec import LongSpec
from longspec.bench.latency import Setting, measure_latency, table
from longspec.bench.rounds import CONTEXTS, GAMMAS, VARIANTS, measure_rounds
from longspec.bench.rounds import table as round_table
from longspec.config import DraftConfig
from longspec.decoding.choose import Sampling


def test_every_context_and_batch_is_measured() -> None:
    draft = DraftConfig(window=64, draft_vocab=128)
    setting = Setting("tiny", (64, 256), (1, 2), (2, 4), None, draft, Sampling(), rounds=2)
    lines = measure_latency(setting, "cpu")
    assert [(line.context, line.batch) for line in lines] == [(64, 1), (64, 2), (256, 1), (256, 2)]
    for line in lines:
        assert line.nodes == 7
        assert line.ratio == pytest.approx(line.tree / line.vanilla)
        assert line.tokens_per_second == pytest.approx(1000 * line.batch / line.vanilla)
    assert lines[0].draft_kv_bytes == lines[2].draft_kv_bytes, "whatever the context"
    assert lines[0].floor < lines[2].floor
    assert table(lines).count("\n") == 5


def test_the_parts_of_a_chains_round(tiny: LongSpec) -> None:
    lines = measure_rounds(tiny.engine.target, 1)
    assert len(lines) == len(CONTEXTS) * len(VARIANTS) * len(GAMMAS)
    assert all(min(one.propose, one.verify, one.whole) > 0 for one in lines)
    assert len(round_table(lines).splitlines()) == 2 + len(CONTEXTS) * len(VARIANTS)
