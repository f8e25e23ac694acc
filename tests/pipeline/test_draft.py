"""`longspec draft` as a user runs it: real processes, a random target that is small enough for a CPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from longspec import LongSpec
from longspec.data.records import read_records
from longspec.data.synthesis import summary_of
from tests.train.tiny import no_launcher


def command(target: Path, output: Path, *more: object) -> list[str]:
    flags = ["--target", target, "--output", output, "--device", "cpu", "--tokens", "10k", *more]
    return [sys.executable, "-m", "longspec", "draft", *map(str, flags)]


def environment() -> dict[str, str]:
    return no_launcher() | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def run(
    target: Path, output: Path, *more: object, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(target, output, *more),
        capture_output=True,
        text=True,
        timeout=900,
        env=environment(),
        cwd=cwd,
    )


def kill_when(target: Path, output: Path, is_time: Callable[[], bool], *more: object) -> None:
    """Run the command, and kill it with SIGKILL as soon as `is_time`."""
    process = subprocess.Popen(
        command(target, output, *more),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    deadline = time.monotonic() + 600
    while not is_time():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def stamps(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*.npy")}


def test_a_killed_command_goes_on_to_the_draft_of_its_plan(
    small_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, work = tmp_path / "my draft", tmp_path / "my draft" / "work"
    log, documents = tmp_path / "log.txt", tmp_path / "novel.txt"
    questions = [f"What is {n} plus {n}?" for n in range(20)]
    questions[9] = (
        "How many sacks of flour has the miller who sold nine of his eighteen, and where are the others?"
    )
    log.write_text("\n".join([*questions, questions[9].upper(), questions[9] + " Tell me."]))
    novel = "The miller counted his sacks again. Nobody had paid.\n\n" * 200
    documents.write_text(novel + questions[9] + novel)
    given = ("--prompts", log, "--documents", documents, "--licence", "CC0-1.0")
    kill_when(small_target, output, (work / "run/base/checkpoints/step-00000013").is_dir, *given)
    plan, written = (work / "plan.json").read_bytes(), stamps(work / "data")
    assert not (output / "config.json").exists()

    from longspec.cli.main import main

    assert main([*command(small_target, output, *given)[3:], "--seed", "1"]) == 2
    assert "seed was 0 and is 1" in capsys.readouterr().err
    done = run(small_target, Path(output.name), *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train base" in done.stderr
    assert "write" not in done.stderr.partition("\n\n[")[2], "what was written is not written again"
    assert (work / "plan.json").read_bytes() == plan
    assert stamps(work / "data") == written

    # What came out is what was planned, and what was given is in it.
    planned = json.loads(plan)["plan"]
    stages = list(yaml.safe_load_all((output / "training.yaml").read_text()))
    told = [(one["settings"]["stage"]["seq_length"], one["step"]) for one in stages]
    assert told == [(one["seq_length"], one["steps"]) for one in planned["stages"]]
    assert [one["seq_length"] for one in planned["stages"]] == [128, 256]
    kinds = [record["kind"] for _, record in read_records([str(work / "prompts.jsonl")])]
    assert kinds.count("own") == 3 * 18, "each of the user's prompts three times, two are kept to measure on"
    learnt = [(work / f"{name}.jsonl").read_text() for name in ("prompts", "documents")]
    assert not any("nine of his eighteen" in text.lower() for text in learnt), (
        "nor what is nearly one of them"
    )
    assert len(set(kinds)) > 10
    card = (output / "README.md").read_text()
    assert "| novel.txt | CC0-1.0 |" in card
    assert "| own_held_out | 1 |" in card.partition("## Measured")[2]
    for one in planned["written"]:
        assert summary_of(work / "data" / one["name"]).lost_share < 0.15
    first, second = done.stdout.splitlines()[-2:]
    assert (
        first == f"longspec generate --target {small_target} --draft '{output.name}' \"Why is the sky blue?\""
    )
    assert second.startswith("longspec serve ")
    model = LongSpec.from_pretrained(small_target, output, dtype="float32", device="cpu", calibrate=False)
    asked: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0}
    drafted = model.generate("Hello", method="seq", gamma=4, **asked)
    assert drafted.token_ids == model.generate("Hello", method="vanilla", **asked).token_ids


@pytest.mark.full
def test_killed_twice_it_makes_the_same_draft(small_target: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(small_target, whole).returncode == 0
    data = broken / "work" / "data"
    kill_when(small_target, broken, (data / "questions" / "shard-00000").is_dir)
    kill_when(small_target, broken, (broken / "work/run/base/checkpoints/step-00000026").is_dir)
    assert run(small_target, broken).returncode == 0
    for path in (whole / "work" / "data").rglob("*.npy"):
        other = broken / path.relative_to(whole)
        assert path.read_bytes() == other.read_bytes(), path
    weights = [load_file(folder / "model.safetensors") for folder in (whole, broken)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name])
    again = run(small_target, whole)
    assert again.returncode == 0
    assert "[" not in again.stderr.rpartition("of disk")[2], "nothing is left to do"

    # A draft goes on from one that exists, and a target without a template gets one, too.
    on = run(small_target, tmp_path / "on", "--draft", whole)
    assert on.returncode == 0, on.stderr
    stages = list(yaml.safe_load_all((tmp_path / "on" / "training.yaml").read_text()))
    assert [one["settings"]["stage"]["name"] for one in stages] == ["base", "long", "base", "long"]


@pytest.mark.full
def test_a_target_without_a_template_and_a_budget_of_time(small_target: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for path in small_target.iterdir():
        if path.name != "chat_template.jinja":
            (base / path.name).write_bytes(path.read_bytes())
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    flags = [one for one in command(base, tmp_path / "draft") if one not in ("--tokens", "10k")]
    started = time.monotonic()
    done = subprocess.run([*flags, "--budget", "2m"], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 360, "even on a machine that others use"
    assert "continues texts" in done.stderr
    plan = json.loads((tmp_path / "draft" / "work" / "plan.json").read_text())["plan"]
    assert {one["mode"] for one in plan["written"]} == {"documents"}


def test_bad_input_is_one_line(
    small_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from longspec.cli.main import main

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bad.jsonl").write_text('{"prompt": "Hi"}\n{"question": "?"}\n')
    cases = {
        ("--budget", "soon"): "--budget: 'soon' is not a time like 90s, 60m or 8h",
        ("--tokens", "10k", "--budget", "1h"): "not allowed with",
        ("--tokens", "10"): "tokens is 10; at least 8,192 are needed",
        ("--prompts", "nowhere.jsonl"): "--prompts: there is no file nowhere.jsonl",
        ("--output", str(tmp_path / "full")): "is not empty",
        ("--draft", "/nowhere"): "there is no draft '/nowhere'",
        ("--prompts", str(tmp_path / "bad.jsonl")): "bad.jsonl line 2: a text 'prompt'",
        ("--prompts", str(tmp_path / "empty.txt")): "empty.txt has no prompts",
        ("--documents", str(tmp_path / "empty.txt")): "empty.txt is empty",
        ("--documents", str(tmp_path / "bad.jsonl")): "bad.jsonl line 1: a text 'text' is needed",
    }
    for flags, message in cases.items():
        output = [] if "--output" in flags else ["--output", str(tmp_path / "out")]
        try:
            code = main(
                ["draft", "--target", str(small_target), "--device", "cpu", "--dry-run", *output, *flags]
            )
        except SystemExit as error:  # argparse's
            code = int(error.code or 0)
        printed = capsys.readouterr().err
        assert (code, printed.count("\n")) == (2, 1), printed
        assert message in printed
    assert not (tmp_path / "out").exists(), "a plan alone writes nothing"
