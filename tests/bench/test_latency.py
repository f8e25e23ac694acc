"""What steps and rounds cost can be measured anywhere, and what does not fit is told line by line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.random_weights import main

COMMAND = (
    "benchmarks.random_weights latency --shape tiny --context 64 256 1000000000 --batch 1 2 --tree-shape 2,4 "
    "--draft-vocab 128 --rounds 3 --repeats 3 --device cpu --tau 2.5"
)


def test_every_context_and_batch_is_measured(tmp_path: Path) -> None:
    """Also those whose KV no machine holds: they have a line of their own and stop nothing."""
    program = [sys.executable, "-m", *COMMAND.split(), "--output", str(tmp_path / "run")]
    result = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    text, found = result.stdout, json.loads((tmp_path / "run" / "latency.json").read_text())
    assert (tmp_path / "run" / "latency.md").read_text() in text
    assert (tmp_path / "run" / "latency.png").read_bytes().startswith(b"\x89PNG")
    lines = found["lines"]
    assert [(line["context"], line["batch"]) for line in lines] == [(64, 1), (64, 2), (256, 1), (256, 2)]
    assert [one["context"] for one in found["missing"]] == [1000000000] * 2
    assert text.count("does not fit: the KV takes") == 2
    assert len({line["draft_kv_bytes"] for line in lines}) == 1, "whatever the context and batch"
    assert "KV of a row is the same at every context" in text
    for line in lines:
        assert line["nodes"] == 7
        # Two layers, keys and values of two heads of 16 in fp32.
        assert line["kv_bytes"] == 2 * 2 * 2 * 16 * 4 * line["context"] * line["batch"]
        assert line["draft_weights_bytes"] > 128 * 64 * 4, "its rows of the head counted"
        assert line["share_of_floor"] == pytest.approx(line["floor"] / line["greedy"]["step"]["median"])
        for mode in (line["greedy"], line["sampled"]):
            assert 0 < mode["ratio"]["least"] <= mode["ratio"]["median"] <= mode["ratio"]["most"]
            step, whole = mode["step"]["median"], mode["round"]["median"]
            assert mode["vanilla_tokens_per_second"] == pytest.approx(1000 * line["batch"] / step)
            assert mode["tree_tokens_per_second"] == pytest.approx(2500 * line["batch"] / whole)
    # Twice the KV, and nothing else, is what the floor grows by from batch to batch.
    growth = [lines[place + 1]["floor"] - lines[place]["floor"] for place in (0, 2)]
    assert growth[1] == pytest.approx(4 * growth[0])
    assert "--shape tiny" in found["command"]
    assert found["environment"].keys() >= {"processor", "torch", "commit"}


def test_auto_gives_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    arguments = "latency --shape tiny --context 64 --rounds 2 --repeats 1 --max-nodes auto --device cpu"
    assert main([*arguments.split(), "--temperature", "0", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    assert 2 <= line["nodes"] <= sum(line["tree_shape"]) + 1
    assert line["sampled"] is None
    assert os.listdir(tmp_path / "calibration"), "by what was measured here"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--shape huge", "shape 'huge' is unknown"),
        ("--context 0", "contexts are [0]"),
        ("--max-nodes many", "--max-nodes is 'many'"),
        ("--tree-shape 600", "601 nodes with its root"),
        ("--tau 0.5", "--tau is 0.5"),
    ],
)
def test_bad_values_are_one_line(flags: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(["latency", *flags.split()]))
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
