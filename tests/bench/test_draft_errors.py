"""The program that says what a draft gets wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.draft_errors import COLUMNS, copied, main


@pytest.mark.parametrize(
    ("text", "window", "expected"),
    [
        ([1, 2, 3, 9, 2, 4, 1, 2], 7, 3),  # two tokens count more than one, though they are further back
        ([1, 2, 3, 9, 2, 4, 1, 2], 6, 4),
        ([1, 2, 3, 9, 2, 4, 1, 2], 3, None),
        ([5, 5], 8, 5),
        ([5], 8, None),
    ],
)
def test_what_copying_gives(text: list[int], window: int, expected: int | None) -> None:
    assert copied(text, len(text) - 1, window) == expected


def test_with_real_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "two.jsonl"
    prompts.write_text('{"prompt": "Write a haiku about rain."}\n{"prompt": "Name three colours."}\n')
    flags = [str(prompts), "--new-tokens", "24", "--lags", "1,5", "--device", "cpu"]
    assert main(["smollm2-135m", "smollm2-135m", *flags]) == 0
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[:2] for line in lines] == [["two", "1"], ["two", "5"]]
    for line in lines:
        found = dict(zip(COLUMNS, map(float, line[2:]), strict=True))
        assert 0.3 < found["best token"] <= found["best or copied"] <= found["best 4 or copied"] <= 1
        assert found["best token"] < found["best 4"]
        assert 0 < found["KL"] < 3
    assert main(["smollm2-135m", str(tmp_path / "nothing"), *flags]) == 2
    assert "draft_errors: error: " in capsys.readouterr().err
