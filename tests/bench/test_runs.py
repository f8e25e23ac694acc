"""Benchmarks as users run them: real processes, kill and resume, a full disk, and what the rows then say."""

from __future__ import annotations

import html.parser
import json
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from longspec import LongSpec
from longspec.bench.catalogue import builtin_set, long_item
from longspec.bench.exact import describe_difference, first_difference
from longspec.bench.folder import read_run, row_key
from longspec.bench.report import MAIN, cells, markdown, page
from longspec.bench.summary import Spread, summarise
from longspec.cli.main import main
from longspec.cli.terminal import explained
from tests.bench.rows import made_row, made_run
from tests.cli.run import exit_code

PROGRAM = (sys.executable, "-m", "longspec")
BENCH = (*PROGRAM, "bench", "generate", "--max-new-tokens", "10", "--methods", "lookup")
TIMES = {"prefill_seconds", "decode_seconds", "peak_memory", "memory_above_start", "load_average", "finished"}


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120, **options)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    # Without a line that is being written, or that a kill cut off.
    whole, _, _ = (folder / "rows.jsonl").read_text().rpartition("\n")
    rows = [json.loads(line) for line in whole.splitlines()]
    return [{name: row[name] for name in row.keys() - TIMES} for row in rows]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "some.jsonl"
    lines = [
        {"prompt": "Say: a b c d, a b c d, a b c d"},
        {"question_id": 81, "category": "writing", "turns": ["Hi", "Again, and the same once more"]},
        {"prompt": "<script>alert(1)</script> <b>&amp;", "raw": True},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


@pytest.fixture(scope="session")
def whole(prompts: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    flags = ("--workload", str(prompts), "--temperature", "0,0.8", "--repeats", "2", "--output", str(folder))
    done = run(*BENCH, *flags, "--target", str(tiny_folder), "--dtype", "float32", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| lookup |") == 6
    assert (folder / "speedup.png").read_bytes().startswith(b"\x89PNG")
    return folder


def test_every_cell_is_measured_and_nothing_differs_from_vanilla(whole: Path) -> None:
    about, rows = read_run(whole)
    assert len(rows) == 3 * 2 * 2 * 2
    assert len({row_key(row) for row in rows}) == len(rows)
    assert {row["method"] for row in rows} == {"vanilla", "lookup"}
    assert about["facts"]["environment"]["device"] == "cpu"
    assert about["command"].startswith("longspec bench generate ")
    for row in rows:
        assert row["decode_seconds"] > 0
        assert row["prefill_seconds"] > 0
        assert row["difference"] is None
        assert row["compared"] == (row["method"] == "lookup" or row["repeat"] > 0)
    talk = next(row for row in rows if row["item"] == "81")
    assert talk["kind"] == "writing"
    assert len(talk["token_ids"]) == 2


def test_a_run_that_was_killed_goes_on_and_has_the_same_rows(
    whole: Path, prompts: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "killed"
    flags = ("--workload", str(prompts), "--temperature", "0,0.8", "--repeats", "2", "--output", str(folder))
    command = (*BENCH, *flags, "--target", str(tiny_folder), "--dtype", "float32", "--device", "cpu")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (folder / "rows.jsonl").exists() or len(rows_of(folder)) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = rows_of(folder)
    assert 5 <= len(kept) < 24
    with open(folder / "rows.jsonl", "a") as file:
        file.write('{"workload": "some", "it')  # as if it had been killed while it wrote
    again = command[len(PROGRAM) :]
    assert main(again) == 0
    rows = rows_of(folder)
    assert rows[: len(kept)] == kept
    assert rows == rows_of(whole)
    # Another question does not belong into the same folder.
    assert main([*again, "--max-new-tokens", "12"]) == 2
    assert "max_new_tokens was 10 and is 12" in capsys.readouterr().err


def test_a_terminal_gets_a_table_and_no_promise_of_plots_that_are_not_there(
    whole: Path, prompts: Path, tiny_folder: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    flags = ("--workload", str(prompts), "--temperature", "0,0.8", "--repeats", "2", "--output", str(whole))
    command = [*BENCH[len(PROGRAM) :], *flags, "--target", str(tiny_folder), "--dtype", "float32"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("longspec.bench.plots.can_draw", lambda: False)
    assert main([*command, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "│ some/all" in shown
    assert "tau is how many tokens a round emits" in " ".join(shown.split())
    assert "| --- |" not in shown
    assert f"Rows are in {whole}" in shown.replace("\n", "")


def test_a_full_disk_keeps_what_is_finished(prompts: Path, tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "full"
    command = (*BENCH, "--workload", str(prompts), "--output", str(folder), "--target", str(tiny_folder))

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    stopped = run(*command, preexec_fn=small_disk)
    assert stopped.returncode == 2, stopped.stderr
    kept = rows_of(folder)
    assert kept
    (line,) = [line for line in stopped.stderr.splitlines() if line.startswith("longspec: error")]
    assert f"the {len(kept)} finished rows are kept" in line
    assert main(command[len(PROGRAM) :]) == 0
    assert rows_of(folder)[: len(kept)] == kept
    assert len(rows_of(folder)) == 3 * 2 * 3


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--workload", "nosuch"), "workload 'nosuch' is unknown"),
        (("--workload", "longbench:poems"), "LongBench task 'poems' is unknown"),
        (("--workload", "builtin:poems"), "the built-in kinds are chat"),
        (("--workload", "repo:many"), "repo:4096"),
        (("--methods", "telepathy"), "method 'telepathy' is unknown"),
        (("--methods", "lookup:fast"), "'fast' is no size"),
        (("--methods", "tree"), "needs a draft"),
        (("--methods", ""), "there are no methods"),
        (("--temperature", "hot"), "temperatures is 'hot'; a list of numbers"),
        (("--temperature", "nan"), "one of temperatures is nan"),
        (("--baseline", "vllm"), "invalid choice: 'vllm'"),
        (("--batch", "0"), "batch is 0"),
        (("--workload", "EMPTY"), "empty.jsonl: it is empty"),
        (("--workload", "BAD"), "line 2: needs a text 'prompt'"),
        (("--workload", "text:2040"), "too long: with 10 new tokens the shortest takes 2050"),
        (("--output", "model"), "model is not empty and has no run.json of longspec bench"),
        (("--output", "empty.jsonl/run"), "empty.jsonl is a file; name a folder"),
        (("--output", ""), "the path is empty"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    flags: tuple[str, str], told: str, tiny_folder: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "Hi"}\n{"turns": []}\n')
    files = {"EMPTY": str(tmp_path / "empty.jsonl"), "BAD": str(tmp_path / "bad.jsonl")}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    arguments = ("--max-new-tokens", "10", "--target", str(tiny_folder), "--methods", "lookup")
    assert exit_code(["bench", "generate", *arguments, flags[0], files.get(flags[1], flags[1])]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert told in line
    assert not (tmp_path / "outputs").exists()
    assert [one.name for one in (tmp_path / "model").iterdir()] == ["config.json"]


def test_batches_run_side_by_side_and_say_the_same(
    whole: Path, prompts: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "batches"
    flags = ["--workload", str(prompts), "--temperature", "0,0.8", "--repeats", "1", "--batch", "2"]
    flags += ["--output", str(folder), "--target", str(tiny_folder), "--dtype", "float32", "--device", "cpu"]
    assert main([*BENCH[len(PROGRAM) :], *flags]) == 0
    assert "up to 2 answers side by side" in capsys.readouterr().out
    _, rows = read_run(folder)
    alone = {row_key(row): row for row in read_run(whole)[1]}
    assert all(row["token_ids"] == alone[row_key(row)]["token_ids"] for row in rows)
    assert not any(row["difference"] for row in rows)
    # The first and the third prompt are of one kind, and the conversation has a batch of its own.
    greedy = [row for row in rows if row["method"] == "lookup" and row["temperature"] == 0]
    assert [(row["item"], row["batch"]) for row in greedy] == [("1", "1"), ("3", "1"), ("81", "81")]
    first, third = greedy[:2]
    assert first["batch_seconds"] == third["batch_seconds"]
    seconds = [row["prefill_seconds"] + row["decode_seconds"] for row in (first, third)]
    assert max(seconds) == pytest.approx(first["batch_seconds"])
    figures = summarise([first, third])[0]
    speed = (first["tokens"] + third["tokens"]) / first["batch_seconds"]
    assert figures.tokens_per_second.median == pytest.approx(speed)
    assert main(["bench", "generate", "--batch", "2", "--baseline", "hf"]) == 2
    assert "leave out --batch" in capsys.readouterr().err


class _Tables(html.parser.HTMLParser):
    """The cells of every table, and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.text = ""
        self._in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self.rows[-1][-1] += data


def test_the_page_has_the_numbers_of_the_json_and_escapes_every_word(whole: Path) -> None:
    done = run(*PROGRAM, "bench", "report", str(whole))
    assert done.returncode == 0, done.stderr
    text = (whole / "report.html").read_text()
    shown = _Tables()
    shown.feed(text)
    summary = json.loads((whole / "summary.json").read_text())
    start = shown.rows.index(list(MAIN))
    table = shown.rows[start + 1 : start + 1 + len(summary)]
    assert len(summary) == len(table) == 2 * 2 * 3
    for one, line in zip(summary, table, strict=True):
        assert line[2] == one["method"]
        assert line[3].startswith(f"{one['tokens_per_second']['median']:.1f}")
        assert line[4].startswith(f"{one['speedup']['vanilla']['median']:.2f}")
        assert line[5] == f"{one['tau']:.2f}"
    # One number sums it up, at the top; a title, a heading; each turn's answer under its own name.
    ours = [one for one in summary if (one["method"], one["kind"]) == ("lookup", "all")]
    best = max(one["speedup"]["vanilla"]["median"] for one in ours)
    assert f'<h1>LongSpec: whole</h1>\n<div class="cards"><div class="card"><b>{best:.2f}×' in text
    assert (text.count("<h1>"), text.count("<h2>")) == (1, 0)
    assert "script" not in shown.tags
    assert "http" not in text.replace("http-equiv", "")
    # A model may say anything, and so may the names in a file.
    evil = "</div><script>alert(1)</script><img src=x onerror=alert(2)>"
    rows = [made_row("vanilla"), made_row("lookup", pieces=[[evil, "b"]], depths=[[0, 1]], item=evil)]
    made = _Tables()
    made.feed(page([(evil, made_run(command=evil), rows)], 4))
    assert not made.tags & {"script"}
    assert made.text.count("alert(1)") >= 4
    assert "Answer of turn" not in made.text
    rows[1] |= {"pieces": [["a"], ["b"]], "depths": [[1], [1]]}
    text = page([("one", made_run(), rows), ("two", made_run(), rows)], 1)
    assert text.index("Answer of turn 1") < text.index("Answer of turn 2")
    assert (text.count("<h1>"), text.count("<h2>")) == (1, 2)
    facts = made_run()["facts"] | {"repeats": 1}
    assert "decoding alone, one repeat;" in markdown(summarise(rows), made_run(facts=facts))


def test_figures_are_medians_of_repeats_and_ratios_within_one() -> None:
    seconds = {"vanilla": (2.0, 4.0, 6.0), "lookup": (1.0, 1.0, 6.0), "hf": (4.0, 4.0, 4.0)}
    rows = [
        made_row(method, repeat=repeat, decode_seconds=own[repeat])
        for repeat in range(3)
        for method, own in seconds.items()
    ]
    margins = {"turn": 0, "place": 1, "vanilla": 5, "other": 6, "margin": -1e-5, "rounding": 2e-5}
    rows[-2] = rows[-2] | {"difference": margins}
    vanilla, lookup, hf = summarise(rows)
    assert lookup.speedup["vanilla"] == Spread(2.0, 1.0, 4.0)
    assert lookup.speedup["hf"].median == 4.0
    assert vanilla.speedup["vanilla"].median == 1.0
    assert hf.speedup["vanilla"].median == 1.0
    assert lookup.tokens_per_second.median == 8.0
    assert lookup.tau == 8 / 5
    assert lookup.acceptance == [0.4, 0.2]
    assert (lookup.different, lookup.largest_margin) == (1, 1e-5)
    assert cells(lookup)[-1] == "1 of 3 differ, margin at most 1e-05, all within rounding"
    rows[-5] = rows[-5] | {"difference": margins | {"margin": 3e-5}}
    assert cells(summarise(rows)[1])[-1] == "2 of 3 differ, margin at most 3e-05, 1 within rounding"
    # Of a repeat that was broken off the speed does not count, but ratios use what both have.
    more = [made_row("vanilla", item="2", decode_seconds=6.0), *rows[:4]]
    broken = summarise(more)
    assert broken[0].tokens_per_second.median == 2.0
    assert broken[1].speedup["vanilla"].median == 2.0


def test_the_margin_of_a_difference_is_the_targets_own(tiny: LongSpec, tiny_folder: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    prompt = tiny.encoder.encode("Hello there", False, 49152)
    said = tiny.generate(prompt, max_new_tokens=6, eos_ids=(), temperature=0.0).token_ids
    assert first_difference(said, said) is None
    assert first_difference(said, said[:4]) == 4
    other = [*said[:3], (said[3] + 1) % 49152, 7, 8]
    assert first_difference(said, other) == 3
    found = describe_difference(tiny, prompt, said, other, 3, 0.0, 0)
    with torch.inference_mode():
        theirs = LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
        logits = theirs(torch.tensor([[*prompt, *said[:3]]])).logits[0, -1]
    assert found["margin"] == pytest.approx(float(logits[said[3]] - logits[other[3]]), abs=1e-4)
    assert found["margin"] > 0
    assert found["rounding"] == pytest.approx(2**-23 * float(logits.abs().max()))
    # Sampled, the seed's noise is in it: what was chosen wins over anything else.
    drawn = tiny.generate(prompt, max_new_tokens=6, eos_ids=(), temperature=1.5, seed=4).token_ids
    assert drawn != said
    wrong = [*drawn[:2], (drawn[2] + 1) % 49152]
    assert describe_difference(tiny, prompt, drawn, wrong, 2, 1.5, 4)["margin"] > 0
    assert describe_difference(tiny, prompt, drawn, drawn[:2], 2, 1.5, 4)["margin"] is None


def test_the_builtin_set_has_every_kind_and_prompts_of_any_length(smollm2: LongSpec) -> None:
    items = builtin_set(smollm2).items
    assert {item.kind for item in items} >= {
        "chat",
        "code",
        "maths",
        "summary",
        "translation",
        "repo",
        "text",
    }
    assert len({item.id for item in items}) == len(items)
    assert any(len(item.turns) > 1 for item in items)
    for source, length in (("repo", 300), ("repo", 30_000), ("text", 300), ("text", 20_000)):
        prompt = long_item(smollm2, source, length).prompt(smollm2, [])
        assert len(prompt) == length
        text = smollm2.tokenizer.decode(prompt)
        assert "Summarise the text above" in text if source == "text" else "raise" in text


def test_explain_marks_what_was_drafted(smollm2_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "Repeat this twice: one two three four five six, one two three four five six"
    flags = [
        "generate",
        "--temperature",
        "0",
        "--max-new-tokens",
        "30",
        "--target",
        str(smollm2_folder),
        prompt,
    ]
    assert main([*flags, "--method", "vanilla"]) == 0
    plain = capsys.readouterr().out
    explain = [*flags, "--method", "lookup", "--explain"]
    assert main(explain) == 0
    marked = capsys.readouterr().out
    assert re.search(r"\{1:[^}]+\}\{2:[^}]+\}", marked)
    assert re.sub(r"\{\d+:([^}]*)\}", r"\1", marked) == plain
    # The same by colours, which hide nothing and escape nothing that the model says.
    pieces, depths = ["a\x1b[31m", "b\n", "c"], [0, 1, 7]
    coloured = explained(pieces, depths, colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == "a\u241b[31mb\nc"
    assert main([*explain, "--json"]) == 2
