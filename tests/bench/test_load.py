"""Requests that arrive one by one: real ones, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from longspec import LongSpec
from longspec.bench import load
from longspec.bench.load import arrivals, measure_load
from longspec.bench.settings import LoadSetting
from longspec.bench.workloads import Item, Workload
from longspec.cli.main import main
from longspec.engine.sequence import Sequence

PROMPTS = ("Say: a b c d, a b c d, a b c d", "Hello there", "One two three, one two")


def test_rates_and_shares_from_the_command_line(
    tiny: LongSpec, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in PROMPTS))
    flags = ["bench", "load", "--workload", str(prompts), "--requests", "9", "--max-new-tokens", "12"]
    flags += ["--method", "lookup", "--temperature", "0.8", "--seed", "4", "--target", str(tiny_folder)]
    flags += ["--device", "cpu", "--dtype", "float32", "--max-rows", "4"]
    output = tmp_path / "load.json"
    assert main([*flags, "--rates", "40,400", "--json", "--output", str(output)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads(output.read_text()) == found
    assert (found["num_prompts"], found["environment"]["device"]) == (3, "cpu")
    assert [line["rate"] for line in found["lines"]] == [40, 400]
    # What a request is told does not depend on when it came and who ran beside it.
    answers = tiny.generate(list(PROMPTS) * 3, max_new_tokens=12, method="lookup", temperature=0.8, seed=4)
    for line in found["lines"]:
        assert (line["requests"], line["starved"]) == (9, 0)
        assert line["tokens"] == sum(one.tokens for one in answers)
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        for part in ("first_token", "between_tokens", "whole"):
            assert 0 < line[part]["p50"] <= line[part]["p90"] <= line[part]["p99"]
        assert line["first_token"]["p99"] <= line["whole"]["p99"]
        assert line["longest_wait"] >= line["first_token"]["p99"]
    slow = found["lines"][0]
    assert slow["seconds"] > arrivals(9, 40, 4)[-1]
    assert main([*flags, "--shares", "0.5"]) == 0
    said = capsys.readouterr().out
    assert "all at once" in said
    assert "(50%)" in said
    assert "No request starved" in said
    for place, told in ((tmp_path / "none" / "x.json", "there is no folder"), (tmp_path, "is a folder")):
        assert main([*flags, "--rates", "40", "--output", str(place)]) == 2
        refused = capsys.readouterr()
        assert told in refused.err
        assert refused.out == "", "before anything is measured"
    assert main([*flags, "--rates", "0"]) == 2
    assert "rates are [0.0]; each must be above 0" in capsys.readouterr().err


def test_arrivals_are_the_same_at_every_rate_but_for_their_scale() -> None:
    slow, fast = arrivals(2000, 5, 1), arrivals(2000, 10, 1)
    assert slow == pytest.approx([2 * at for at in fast])
    assert slow[-1] / 2000 == pytest.approx(1 / 5, rel=0.1)
    assert arrivals(3, None, 1) == [0, 0, 0]


def test_what_never_finishes_has_starved(tiny: LongSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "STARVED_SECONDS", 0.5)
    submit, calls = tiny.engine.submit, iter(range(100))

    def forgetful(sequences: Iterable[Sequence]) -> None:
        # Of the second half, which comes after the warm-up, one is lost.
        if next(calls) != 5:
            submit(sequences)

    monkeypatch.setattr(tiny.engine, "submit", forgetful)
    workload = Workload("made", tuple(Item(str(n), "made", (one,)) for n, one in enumerate(PROMPTS)))
    run = measure_load(tiny, workload, LoadSetting(3, rates=(100.0,), max_new_tokens=4, method="vanilla"))
    (line,) = run.lines
    assert (line.requests, line.starved) == (3, 1)
    assert line.longest_wait > 0.4
