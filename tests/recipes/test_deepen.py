"""A draft that gets more lags drafts as before up to its old depth, and deeper."""

from __future__ import annotations

from pathlib import Path

import pytest

from longspec.decoding.methods import Tree
from longspec.models.draft_files import load_draft
from recipes.smollm2.deepen import main
from tests.decoding.scripted import ask, tiny_draft, tiny_engine, tiny_target


def test_a_draft_gets_deeper(tmp_path: Path) -> None:
    target = tiny_target()
    known = tiny_draft(target, max_lag=3)
    known.save_pretrained(tmp_path / "known", target, "tiny", {"chain": [0.5, 0.3, 0.2]})
    (tmp_path / "known" / "training.yaml").write_text("step: 3\n")
    main([str(tmp_path / "known"), str(tmp_path / "deeper"), "--max-lag", "5"])
    loaded = load_draft(tmp_path / "deeper", target, "tiny")
    assert (loaded.draft.config.max_lag, loaded.acceptance) == (5, {})
    assert (tmp_path / "deeper" / "training.yaml").read_text() == "step: 3\n", "it keeps its history"

    prompts = [[1, 2, 3, 4, 1, 2], [5, 0, 5, 6]]
    vanilla = ask(tiny_engine(target), prompts)
    before, same, deep = (
        ask(tiny_engine(target, draft), prompts, Tree(shape))
        for draft, shape in ((known, (2, 4, 4)), (loaded.draft, (2, 4, 4)), (loaded.draft, (2, 4, 4, 4, 4)))
    )
    assert [one.tokens for one in deep] == [one.tokens for one in vanilla]
    assert [one.depths for one in same] == [one.depths for one in before]

    with pytest.raises(SystemExit, match="has 3 lags already"):
        main([str(tmp_path / "known"), str(tmp_path / "again"), "--max-lag", "3"])
    assert not (tmp_path / "again").exists()
    with pytest.raises(SystemExit, match="exists already"):
        main([str(tmp_path / "known"), str(tmp_path / "deeper"), "--max-lag", "6"])
    assert load_draft(tmp_path / "deeper", target, "tiny").draft.config.max_lag == 5
