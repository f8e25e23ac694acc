"""The layout's promise: imports point one way, and the command line starts without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import longspec

ROOT = Path(longspec.__file__).parent
# A module may import from its own level and from those before it.
LEVELS: list[set[str]] = [
    {"errors", "__init__"},
    {
        "config",
        "generation",
        "option",
        "progress",
        "records",
        "template_process",
        "templates",
        "text",
        "atomic",
    },
    {"prompts"},
    {"hub"},
    {"kernels", "native"},
    {"attention", "cache"},
    {"models"},
    {"decoding"},
    {"options"},
    {"engine"},
    {"api"},
    {"glide", "data"},
    {"train"},
    {"bench", "server", "vllm"},
    {"pipeline"},
    {"cli"},
    {"__main__"},
]


def level(part: str) -> int:
    return next(index for index, names in enumerate(LEVELS) if part in names)


def imports(path: Path) -> set[str]:
    """The parts of longspec that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "longspec":
            parts = node.module.split(".")[1:2]
            found |= set(parts) or {alias.name for alias in node.names if (ROOT / alias.name).exists()}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("longspec.")}
    return found


def test_imports_point_one_way() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        own = "__main__" if parts[-1] == "__main__" else parts[0]  # a way in, wherever it stands
        if own == "__init__":
            continue  # the package's face imports lazily
        for other in imports(path):
            if own != other and level(other) >= level(own):
                wrong.append(f"{path.relative_to(ROOT)} imports longspec.{other}")
    assert not wrong


def test_the_published_names_are_used_by_nobody_here() -> None:
    """They are clients. The package re-exports them, and under the published paths too."""
    users = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if "glide" in imports(path)}
    assert users == {"__init__.py", "train/models/llama_glide.py", "train/models/qwen2_glide.py"}


def newly_imported(names: tuple[str, ...], code: str, before: str = "") -> list[str]:
    """Which of these modules a fresh process imports for `code`, and not for what comes before it."""
    told = f"print([name for name in {names!r} if name in set(sys.modules) - known])"
    code = f"import sys\n{before}\nknown = set(sys.modules)\n{code}\n{told}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: list[str] = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("words", [["--help"], ["generate", "--temperature", "-1", "Hi"]])
def test_help_and_refusals_import_nothing_heavy(words: list[str]) -> None:
    code = f"import longspec.cli.main as m\ntry: m.main({words!r})\nexcept SystemExit: pass"
    assert newly_imported(("torch", "transformers", "numpy", "rich"), code) == []


def test_loading_imports_nothing_that_takes_seconds() -> None:
    heavy = ("sympy", "torch._dynamo", "transformers.models.auto", "transformers.modeling_utils")
    code = "from longspec import LongSpec\nLongSpec.from_pretrained(calibrate=False)"
    assert newly_imported(heavy, code, before="import torch") == []


def test_no_two_public_classes_have_one_name() -> None:
    names = [
        node.name
        for path in ROOT.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_a_draft_is_exported_and_drawn_without_what_training_needs() -> None:
    extra = ("hydra", "omegaconf", "deepspeed", "datasets", "zstandard", "tensorboard", "matplotlib")
    assert newly_imported(extra, "import longspec.train.export, longspec.train.report") == []
