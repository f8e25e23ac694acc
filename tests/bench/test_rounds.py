"""The parts of a chain's round, as the program that times them shows them."""

from __future__ import annotations

from benchmarks.rounds import CONTEXTS, GAMMAS, VARIANTS, measure_rounds, table
from longspec import LongSpec


def test_the_parts_of_a_chains_round(tiny: LongSpec) -> None:
    lines = measure_rounds(tiny.target, 1)
    assert len(lines) == len(CONTEXTS) * len(VARIANTS) * len(GAMMAS)
    assert all(min(one.propose, one.verify, one.whole) > 0 for one in lines)
    assert len(table(lines).splitlines()) == 2 + len(CONTEXTS) * len(VARIANTS)
