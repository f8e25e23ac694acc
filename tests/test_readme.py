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
    lines = "".join(block for block in blocks("sh") if ("longspec draft" in block) == training).splitlines()
    return [line.removeprefix("longspec ") for line in lines if line.startswith("longspec ")]


@pytest.mark.parametrize("command", commands(training=False))
def test_command(command: str, tmp_path: Path, smollm2_folder: Path) -> None:
    (tmp_path / "report.txt").write_text("Sales rose by three percent. Summarise this.")
    arguments = [sys.executable, "-m", "longspec", *shlex.split(command)]
    if arguments[3] == "generate":
        arguments += ["--max-new-tokens", "8"]
    result = subprocess.run(
        arguments, cwd=tmp_path, input="Hi.\n/exit\n", capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.full
def test_making_a_draft(tmp_path: Path, small_target: Path) -> None:
    """As it stands there, but for the size of the target and of its work."""
    shutil.copytree(small_target, tmp_path / "my-llama")
    smaller = {"--budget 60m": "--tokens 9k --device cpu", '"Why is': '--max-new-tokens 8 "Why is'}
    for command in commands(training=True):
        for old, new in smaller.items():
            command = command.replace(old, new)
        arguments = [sys.executable, "-m", "longspec", *shlex.split(command)]
        result = subprocess.run(
            arguments, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=no_launcher()
        )
        assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_python(smollm2_folder: Path) -> None:
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line]) == 5
    code = code.replace("temperature=0.7,", "temperature=0.7, max_new_tokens=8,")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "The capital of France is Paris." in result.stdout


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"make (\w[\w-]*)", README + (ROOT / "CONTRIBUTING.md").read_text()))
    assert named >= {"demo", "test"}
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in named)


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(README.split()) <= 700


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
for folder in ("docs", "examples", "recipes"):
    PAGES += sorted((ROOT / folder).rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for path, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if "://" in path:
            continue
        there = page.parent / path if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            missing.append(f"{path}#{anchor}")
    assert not missing
