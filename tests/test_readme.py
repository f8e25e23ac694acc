"""What the README tells people to type works."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.tiny import no_launcher

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(training: bool) -> list[str]:
    """Those of the block that trains a draft, which belong together, or all others."""
    lines = "".join(block for block in blocks("sh") if ("longspec train" in block) == training).splitlines()
    return [
        line.removeprefix(".venv/bin/longspec ") for line in lines if line.startswith(".venv/bin/longspec")
    ]


@pytest.mark.parametrize("command", commands(training=False))
def test_command(command: str, tmp_path: Path, smollm2_folder: Path) -> None:
    (tmp_path / "report.txt").write_text("Sales rose by three percent. Summarise this.")
    arguments = [sys.executable, "-m", "longspec", *shlex.split(command)]
    if arguments[3] == "generate":
        arguments += ["--max-new-tokens", "8"]
    result = subprocess.run(
        arguments, cwd=tmp_path, input="/exit\n", capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_training_a_draft_in_four_commands(tmp_path: Path, tiny_folder: Path) -> None:
    """As it stands there, but for sizes, and for a target so small that it can only continue documents."""
    shutil.copytree(tiny_folder, tmp_path / "my-llama")
    (tmp_path / "text.jsonl").write_text(
        '{"text": "%s"}\n' % ("It rained again in the hills that day. " * 40)
    )
    smaller = {
        "--tokens 100M": "--tokens 4k --mode documents --documents text.jsonl --device cpu "
        "--max-new-tokens 64",
        "run=outputs/mine": "run=outputs/mine stage.num_steps=2 stage.accumulation=1 data.num_held_out=1 "
        "target.device=cpu evaluation.new_tokens=8",
        '"Why is': '--max-new-tokens 8 "Why is',
    }
    for command in commands(training=True):
        for old, new in smaller.items():
            command = command.replace(old, new)
        arguments = [sys.executable, "-m", "longspec", *shlex.split(command)]
        result = subprocess.run(
            arguments, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=no_launcher()
        )
        assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_python(smollm2_folder: Path) -> None:
    (code,) = blocks("python")
    code = code.replace("temperature=0.7,", "temperature=0.7, max_new_tokens=8,")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "The capital of France is Paris." in result.stdout


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"make (\w[\w-]*)", README + (ROOT / "CONTRIBUTING.md").read_text()))
    assert named >= {"demo", "test"}
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in named)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text())
    missing = [link for link in links if "://" not in link and not ((ROOT / page).parent / link).exists()]
    assert not missing
