"""The recipe of the shipped draft, end to end on a random target: parts run, stop and go on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import yaml
from safetensors.torch import load_file, save_file

from longspec import LongSpec
from longspec.data.shards import read_info
from tests.train.tiny import no_launcher

ROOT = Path(__file__).parents[2]
TURN_END = 2
# What differs from the real thing: the target has two layers, and nobody waits for a good draft.
SMALL = (
    "draft.cross_layers=[0,1]",
    "draft.window=64",
    "stage.num_steps=3",
    "evaluation.gamma=3",
    "draft.draft_vocab=0",
)


def script(part: str, folder: Path, target: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recipes.smollm2.train", part, "--output", str(folder), "--dry"]
    command += [
        "--target",
        str(target),
        "--tokens",
        "1k",
        "--device",
        "cpu",
        "--methods",
        "seq:3,tree:2x4x4@6",
    ]
    command += [*(f"--set={one}" for one in SMALL), *more]
    environment = no_launcher() | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=ROOT)


@pytest.fixture
def target(tiny_folder: Path, tmp_path: Path) -> Path:
    """The random target, made to end a turn after some words: it has to ask questions."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][TURN_END] *= 4
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.full
def test_the_script_makes_a_draft_and_its_parts_go_on(target: Path, tmp_path: Path) -> None:
    # No stretch of it comes twice, since some pages are held out.
    rng = Random(0)
    words = [
        "miller",
        "sack",
        "road",
        "cart",
        "river",
        "Martha",
        "lamp",
        "stone",
        "garden",
        "letter",
        "winter",
        "horse",
    ]
    sentences = [" ".join(rng.choices(words, k=12)).capitalize() + "." for _ in range(2400)]
    pages = [" ".join(sentences[begin : begin + 8]) for begin in range(0, 2400, 8)]
    book = {"text": "\n\n".join(pages)}
    (tmp_path / "books.jsonl").write_text(json.dumps(book) + "\n")
    (tmp_path / "asked.jsonl").write_text(json.dumps({"turns": ["Who are you?"]}) + "\n")
    given = ["--books", str(tmp_path / "books.jsonl"), "--measure", str(tmp_path / "asked.jsonl")]
    out = tmp_path / "out"

    # A stage without what it starts from is refused; one whose time is up stops with a checkpoint.
    for part in ("mix", "write"):
        done = script(part, out, target, *given)
        assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (out / "data").iterdir()} == {
        *("asked", "questions", "continued", "long_asked", "long_continued", "essays", "mixed")
    }
    early = script("long", out, target)
    assert early.returncode == 2
    assert "there is no draft" in early.stderr
    stopped = script("base", out, target, "--budget-seconds", "0.01")
    assert "base: step 1 of 3; give the same command again" in stopped.stdout, stopped.stdout + stopped.stderr
    assert not (out / "drafts").exists()

    done = script("all", out, target, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = list(yaml.safe_load_all((out / "draft" / "training.yaml").read_text()))
    assert [stage["settings"]["stage"]["name"] for stage in stages] == ["base", "long", "cot"]
    assert [stage["step"] for stage in stages] == [3, 3, 3]
    assert str(tmp_path) not in (out / "draft" / "training.yaml").read_text().replace(str(target), "")
    sources = [{source["name"].rpartition(" ")[2] for source in stage["sources"]} for stage in stages]
    assert sources == [
        {"(prompts)", "(questions)", "(documents)"},
        {"(prompts)", "(documents)"},
        {"(prompts)"},
    ]
    assert read_info(out / "data" / "asked").num_tokens >= 500
    model = LongSpec.from_pretrained(target, out / "draft", device="cpu", calibrate=False)
    assert model.generate("Hello", method="tree", tree_shape=(2, 2), max_new_tokens=8).token_ids
    card = (out / "draft" / "README.md").read_text()
    assert "| books | public domain |" in card.partition("## Given")[2].partition("## Measured")[0]
    assert "| held_books/256 |" in card
    assert len(json.loads((out / "draft" / "config.json").read_text())["acceptance"]["chain"]) == 3

    # On another machine there is only the draft: a new piece starts from it, and its card knows all stages.
    other = tmp_path / "other"
    shutil.copytree(out / "data", other / "data")
    done = script("base", other, target, "--seed", "1", "--start-from", str(out / "draft"))
    assert done.returncode == 0, done.stdout + done.stderr
    card = (other / "drafts" / "base" / "README.md").read_text()
    assert card.count("| base |") == 2
    assert "| cot |" in card
