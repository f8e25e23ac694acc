"""What the README tells people to type works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = "".join(blocks("sh")).splitlines()
    return [
        line.removeprefix(".venv/bin/longspec ") for line in lines if line.startswith(".venv/bin/longspec")
    ]


@pytest.mark.parametrize("command", commands())
def test_command(command: str, tmp_path: Path, smollm2_folder: Path) -> None:
    (tmp_path / "report.txt").write_text("Sales rose by three percent. Summarise this.")
    arguments = [sys.executable, "-m", "longspec.cli.main", *shlex.split(command)]
    if arguments[3] == "generate":
        arguments += ["--max-new-tokens", "8"]
    result = subprocess.run(
        arguments, cwd=tmp_path, input="/exit\n", capture_output=True, text=True, timeout=120
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
