"""Every example runs and shows what it says."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from longspec import LongSpec

ROOT = Path(__file__).parent.parent
SHOWN = {
    "stream": r"8 tokens in \d+ rounds by .+, tau \d",
    "batch": r"the same words alone: True",
    "own_draft": r"tau [1-9]\.\d\d instead of 1\.00",
    "compare_methods": r"(\w+ .+, the same words\n){6}",
}


@pytest.mark.parametrize("name", SHOWN)
def test_example(name: str, smollm2: LongSpec, capsys: pytest.CaptureFixture[str]) -> None:
    import_module(f"examples.{name}").main(smollm2, max_new_tokens=8)
    assert re.search(SHOWN[name], capsys.readouterr().out)


def test_a_document_is_computed_once(smollm2: LongSpec, capsys: pytest.CaptureFixture[str]) -> None:
    import_module("examples.document").main(smollm2, max_new_tokens=4, characters=2_000)
    first, *later = map(int, re.findall(r"of which (\d+) were computed", capsys.readouterr().out))
    assert all(computed < first / 5 for computed in later)
