"""The published experiments with their flags, the curve over the context, and transformers beside us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.headline import BEGIN, END
from benchmarks.headline import main as headline
from benchmarks.plot_readme import draw
from longspec.bench.folder import read_run
from longspec.cli.main import main
from longspec.config import DraftConfig
from longspec.models.draft import GlideDraft
from tests.bench.rows import made_row, made_run

ROOT = Path(__file__).parent.parent.parent


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def draft(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from longspec import LongSpec

    model = LongSpec.from_pretrained(str(tiny_folder), dtype="float32", device="cpu", draft="none")
    made = GlideDraft(model.target.config, DraftConfig(window=16, draft_vocab=100))
    made.initialise()
    folder = tmp_path_factory.mktemp("draft")
    made.save_pretrained(folder, model.target, "tiny")
    return folder


def test_longbench_with_the_published_flags(
    tmp_path: Path, tiny_folder: Path, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A tiny model knows 2048 positions, of which 2000 are kept free; a longer limit is what its config says.
    folder = tmp_path / "longer"
    folder.mkdir()
    for path in tiny_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 5000}
    (folder / "config.json").write_text(json.dumps(config))
    many = "def f(x): return {x: {input}}\n" * 200
    write_lines(
        tmp_path / "lcc.jsonl",
        [
            {"_id": "short", "context": "x = 1\n", "input": ""},
            {"_id": "one", "context": many, "input": "unused"},
            {"_id": "long", "context": many * 5, "input": ""},
            {"_id": "two", "context": many + "y", "input": ""},
        ],
    )
    run = tmp_path / "run"
    flags = ["--model_name", str(folder), "--data_path_prefix", str(tmp_path), "--draft", str(draft)]
    flags += ["--task", "lcc", "--temperature", "0.0", "--gamma", "4", "--max_gen_len", "6"]
    flags += ["--output", str(run)]
    both = ["bench", "longbench", *flags, "--test_length", "0", "--method", "tree", "--tree_shape", "2", "3"]
    assert main(both) == 0
    about, rows = read_run(run)
    assert {row["item"] for row in rows} == {"one", "two"}
    assert [row["method"] for row in rows[:2]] == ["vanilla", "tree:2x3"]
    assert about["left_out"]["longbench:lcc"] == "2 prompts, by their length"
    assert not any(row["difference"] for row in rows)
    capsys.readouterr()
    assert main(["bench", "longbench", *flags, "--task", "poems"]) == 2
    assert "LongBench task 'poems' is unknown; there are: gov_report, qmsum" in capsys.readouterr().err
    write_lines(tmp_path / "qmsum.jsonl", [{"context": "short", "input": "What?"}])
    assert main(["bench", "longbench", *flags, "--task", "qmsum"]) == 2
    assert "none of the 1 prompts of qmsum can be used" in capsys.readouterr().err


def test_aime_with_the_published_flags(
    tmp_path: Path, tiny_folder: Path, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [{"id": number, "problem": f"What is {number} + 1?"} for number in range(58, 64)]
    write_lines(tmp_path / "aime.jsonl", problems)
    run = tmp_path / "run"
    flags = ["--model_name", str(tiny_folder), "--draft", str(draft), "--data_path_prefix", str(tmp_path)]
    flags += ["--method", "seq", "--gamma", "3", "--max_gen_len", "5", "--output", str(run)]
    assert main(["bench", "aime", *flags, "--id_min", "60", "--id_max", "61"]) == 0
    _, rows = read_run(run)
    assert [(row["item"], row["method"]) for row in rows] == [
        *(("60", "vanilla"), ("60", "seq:3")),
        *(("61", "vanilla"), ("61", "seq:3")),
    ]
    capsys.readouterr()
    assert main(["bench", "aime", *flags, "--id_min", "90", "--id_max", "91"]) == 2
    assert "no AIME problems with ids 90 to 91" in capsys.readouterr().err


def test_context_goes_to_the_models_limit(tmp_path: Path, tiny_folder: Path) -> None:
    flags = ["--methods", "lookup:2", "--repeats", "1", "--max-new-tokens", "4"]
    run = tmp_path / "run"
    assert main(["bench", "context", "--target", str(tiny_folder), *flags, "--output", str(run)]) == 0
    _, rows = read_run(run)
    assert [row["prompt_tokens"] for row in rows if row["method"] == "vanilla"] == [1024, 2044]
    assert not any(row["difference"] for row in rows)
    # Of a file no more texts than are asked for, without lengths too.
    texts = [{"context": f"Text {number}. " + "It rained again. " * 900, "input": "?"} for number in range(4)]
    write_lines(tmp_path / "texts.jsonl", texts)
    flags += ["--source", str(tmp_path / "texts.jsonl"), "--limit", "2", "--output", str(tmp_path / "file")]
    assert main(["bench", "context", "--target", str(tiny_folder), *flags]) == 0
    _, rows = read_run(tmp_path / "file")
    assert [row["item"] for row in rows if row["method"] == "vanilla"] == [
        *("1-1024", "2-1024"),
        *("1-2044", "2-2044"),
    ]


def test_context_leaves_out_lengths_that_a_file_does_not_have(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "texts.jsonl", [{"context": "It rained again. " * 350, "input": "?"}])
    flags = ["--methods", "lookup:2", "--repeats", "1", "--max-new-tokens", "4", "--target", str(tiny_folder)]
    flags += ["--source", str(tmp_path / "texts.jsonl"), "--output", str(tmp_path / "run")]
    assert main(["bench", "context", *flags]) == 0
    _, rows = read_run(tmp_path / "run")
    assert {row["item"] for row in rows} == {"1-1024"}
    assert main(["bench", "context", *flags, "--lengths", "1024,2044"]) == 2
    assert "no text long enough for a prompt of 2044 tokens" in capsys.readouterr().err


@pytest.mark.full
def test_transformers_beside_us_says_the_same(tmp_path: Path, smollm2_folder: Path) -> None:
    run = tmp_path / "run"
    flags = ["--workload", "builtin:translation", "--max-new-tokens", "12", "--repeats", "1"]
    flags += ["--target", str(smollm2_folder), "--dtype", "float32", "--device", "cpu", "--baseline", "hf"]
    flags += ["--assistant", str(smollm2_folder), "--methods", "lookup", "--output", str(run)]
    assert main(["bench", "generate", *flags]) == 0
    _, rows = read_run(run)
    methods = ["vanilla", "lookup", "hf", "hf-static", "hf-lookup", "hf-assisted"]
    assert [row["method"] for row in rows[:6]] == methods
    assert all(row["decode_seconds"] > 0 for row in rows)
    assert not any(row["difference"] for row in rows)
    (summary,) = [one for one in json.loads((run / "summary.json").read_text()) if one["method"] == "lookup"]
    assert set(summary["speedup"]) == {"vanilla", *methods[2:]}


def test_the_headline_is_made_from_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = dict.fromkeys(("target", "dtype", "processor", "threads", "torch", "transformers"), "x")
    facts = {"environment": environment | {"device": "cpu", "commit": "c"}, "repeats": 1, "max_new_tokens": 9}
    folder = tmp_path / "results" / "made"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(made_run(facts=facts)))
    speeds = {"vanilla": 4.0, "auto": 2.0, "hf": 8.0, "hf-static": 3.0, "hf-lookup": 5.0}
    write_lines(folder / "rows.jsonl", [made_row(name, decode_seconds=own) for name, own in speeds.items()])
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    flags = ["--results", str(tmp_path / "results"), str(readme)]
    assert headline([*flags, "--check"]) == 1
    assert headline(flags) == 0
    assert headline([*flags, "--check"]) == 0
    text = readme.read_text()
    assert "| made | 0 | 2.00 | 1.50, hf-static | 4.0 | 1.60 | yes |" in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "stale" not in text
    readme.write_text("no place")
    assert headline(flags) == 2


def test_the_readmes_picture_is_drawn_from_the_committed_results() -> None:
    batch, context, transformers = draw(ROOT / "docs" / "results").axes
    assert [text.get_text() for text in batch.texts] == ["6.5×", "5.7×", "3.9×", "3.2×", "2.2×"]
    assert len(context.lines) == 2
    assert "chat, H200" in [label.get_text() for label in transformers.get_yticklabels()]


def test_the_committed_table_is_that_of_the_committed_runs() -> None:
    page = str(ROOT / "docs" / "benchmarks.md")
    assert headline(["--results", str(ROOT / "docs" / "results"), page, "--check"]) == 0
