"""A draft that comes with the package: found, used by default, left out on demand, and for whom it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import longspec
from longspec import LongSpec, UserError
from longspec.cli.main import main
from longspec.config import DraftConfig
from longspec.hub import DEFAULT_TARGET, shipped_draft
from longspec.models.draft import GlideDraft

ROOT = Path(longspec.__file__).parent.parent.parent


def make_draft(folder: Path, model: LongSpec, name: str, **shape: object) -> Path:
    """An untrained draft for a loaded target, in bf16 as drafts ship."""
    target = model.target
    draft = GlideDraft(target.config, DraftConfig(qkv_bias=False, final_norm=True, **shape))  # type: ignore[arg-type]
    draft.initialise()
    draft.to(torch.bfloat16).save_pretrained(folder, target, name)
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A second place of the package, looked into first, as a package that extends it would have."""
    monkeypatch.setattr(longspec, "__path__", [str(tmp_path / "extra"), *longspec.__path__])
    return tmp_path / "extra"


def test_the_default_target_uses_it_unless_told_otherwise(
    smollm2: LongSpec, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = package / "drafts" / DEFAULT_TARGET
    make_draft(folder, smollm2, DEFAULT_TARGET, cross_layers=(9, 19, 29), use_feature=True)
    assert 11_000_000 < (folder / "model.safetensors").stat().st_size < 16_000_000
    model = LongSpec.from_pretrained(dtype="float32", device="cpu", calibrate=False)
    assert model.draft_name == DEFAULT_TARGET
    question = "What is the capital of France?"
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0}
    drafted = model.generate(question, method="tree", tree_shape=(2, 2), **options)
    assert (drafted.draft, drafted.method) == (DEFAULT_TARGET, "tree")
    assert drafted.token_ids == smollm2.generate(question, method="vanilla", **options).token_ids
    alone = LongSpec.from_pretrained(draft="none", dtype="float32", device="cpu", calibrate=False)
    assert alone.engine.models.draft is None
    assert main(["models"]) == 0
    assert f"{DEFAULT_TARGET} (comes with longspec)" in capsys.readouterr().out


def test_the_draft_of_the_default_target_is_whole_and_good(smollm2: LongSpec) -> None:
    folder = shipped_draft(DEFAULT_TARGET)
    assert folder is not None
    tensors = load_file(folder / "model.safetensors")
    assert (folder / "model.safetensors").stat().st_size <= 16_000_000
    assert {tensor.dtype for name, tensor in tensors.items() if name != "vocab_ids"} == {torch.bfloat16}
    acceptance = json.loads((folder / "config.json").read_text())["acceptance"]
    assert acceptance["chain"]
    assert acceptance["trees"]
    card = (folder / "README.md").read_text()
    assert "| source | licence |" in card
    assert "## Measured" in card

    kept = rounds = 0
    for question in ("How do bees make honey?", "Write a Python function that adds up a list of numbers."):
        options: dict[str, Any] = {"max_new_tokens": 48, "temperature": 0.0}
        drafted = smollm2.generate(question, method="tree", tree_shape=(4, 8, 8, 8), **options)
        assert drafted.token_ids == smollm2.generate(question, method="vanilla", **options).token_ids
        kept, rounds = kept + drafted.tokens - 1, rounds + drafted.rounds
    assert kept / rounds > 2.2


def test_a_tuned_target_may_have_it_with_one_warning_and_another_shape_not(
    tiny: LongSpec, tiny_folder: Path, tmp_path: Path, package: Path, recwarn: pytest.WarningsRecorder
) -> None:
    make_draft(package / "drafts" / DEFAULT_TARGET, tiny, "the first one")
    tuned = shutil.copytree(tiny_folder, tmp_path / "tuned")
    model = LlamaForCausalLM.from_pretrained(tiny_folder)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.1)
    model.save_pretrained(tuned)
    wider = shutil.copytree(tiny_folder, tmp_path / "wider")
    torch.manual_seed(0)
    model.config.intermediate_size = 64
    LlamaForCausalLM(model.config).save_pretrained(wider)

    def load(folder: Path) -> list[str]:
        recwarn.clear()
        LongSpec.from_pretrained(folder, DEFAULT_TARGET, dtype="float32", device="cpu", calibrate=False)
        return [str(warning.message) for warning in recwarn if "draft" in str(warning.message)]

    assert load(tiny_folder) == []
    (warning,) = load(tuned)
    assert "trained for the first one" in warning
    assert "the same shape but other weights" in warning
    with pytest.raises(UserError, match="intermediate_size is 48 there and 64 here"):
        load(wider)


def test_wheel_and_sdist_contain_it(smollm2: LongSpec, tmp_path: Path) -> None:
    tree, built, site = tmp_path / "tree", tmp_path / "built", tmp_path / "site"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    shipped = f"longspec/drafts/{DEFAULT_TARGET}"
    shutil.rmtree(tree / "src" / shipped, ignore_errors=True)
    make_draft(tree / "src" / shipped, smollm2, DEFAULT_TARGET)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(built)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        assert any(name.endswith(f"src/{shipped}/model.safetensors") for name in sdist.getnames())
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(site)

    def run(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "longspec", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    row = next(row for row in json.loads(run("models", "--json")) if row["default"])
    assert (row["draft"], row["draft_shipped"]) == (DEFAULT_TARGET, True)
    asked = ("generate", "--json", "--no-calibrate", "--max-new-tokens", "6", "--temperature", "0", "Hello")
    used = json.loads(run(*asked))
    assert (used["method"], used["draft"]) == ("seq", DEFAULT_TARGET)
