"""What surrounds a command: a full disk, a strict locale, weights that are no numbers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from longspec import LongSpec
from longspec.atomic import write_whole
from longspec.errors import UserError
from tests.cli.run import exit_code

LONGSPEC = [sys.executable, "-m", "longspec"]


def test_a_full_disk_behind_standard_output_is_named() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*LONGSPEC, "models"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left on device: 'standard output'" in done.stderr


def test_a_full_disk_behind_standard_error_leaves_the_exit_code() -> None:
    with open("/dev/full", "w") as full:
        assert subprocess.run([*LONGSPEC, "info", "/nowhere"], stderr=full).returncode == 2


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("info", "PIPE.gguf"), "PIPE.gguf is neither a model folder nor a .gguf file"),
        (("data", "info", "DATASET"), "the dataset DATASET is not finished"),
        (
            ("data", "synthesize", "--output", "out", "--tokens", "9", "--prefixes", "/dev/zero"),
            "more than 32 MiB",
        ),
        (
            (
                "data",
                "synthesize",
                "--output",
                "out",
                "--tokens",
                "9",
                "--mode",
                "prompts",
                "--prompts",
                "/dev/zero",
            ),
            "/dev/zero, line 1: it has more than 32 MiB",
        ),
        (("serve", "--port", "99999"), "port 99999; it must lie between 0 and 65535"),
        (("plot", "RUN", "--output", "/nowhere/plot.png"), "No such file or directory: '/nowhere/plot.png'"),
    ],
)
def test_odd_files_and_numbers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    said: str,
) -> None:
    """Pipes that nobody writes to, lines without end, a port that is none."""
    monkeypatch.chdir(tmp_path)
    for name in ("PIPE.gguf", "DATASET/dataset.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(name)
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "target_loss": 1.0}\n')
    assert exit_code(command) == 2
    error = capfd.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_full_disk_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/made\.json'"):
        write_whole(tmp_path / "made.json", b"{}")
    assert not list(tmp_path.iterdir())


def test_chat_in_a_locale_that_decodes_strictly(tiny_folder: Path) -> None:
    """Latin-1's é is no UTF-8."""
    flags = [
        "chat",
        "--target",
        str(tiny_folder),
        "--device",
        "cpu",
        "--no-calibrate",
        "--max-new-tokens",
        "2",
    ]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(
        [*LONGSPEC, *flags], input=b"caf\xe9\n/exit\n", capture_output=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr


def test_weights_that_are_not_finite_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"'model\.norm\.weight' has values that are not finite"):
        LongSpec.from_pretrained(str(tmp_path), device="cpu", calibrate=False)


@pytest.mark.parametrize("method", ["vanilla", "lookup"])
def test_scores_that_are_no_numbers_are_told(tiny_folder: Path, tmp_path: Path, method: str) -> None:
    """Every weight is finite; their products are not."""
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    for name in ("gate", "up"):
        weights[f"model.layers.0.mlp.{name}_proj.weight"] *= 1e30
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    model = LongSpec.from_pretrained(str(tmp_path), device="cpu", calibrate=False)
    with pytest.raises(UserError, match="the target's scores are not finite: its numbers overflow float32"):
        model.generate("Hi", method=method)


def test_raw_must_be_true_or_false(tiny: LongSpec) -> None:
    with pytest.raises(UserError, match="raw is 'no'; True or False is needed"):
        tiny.generate("x", raw="no")  # type: ignore[call-overload]
    with pytest.raises(UserError, match=r"one of eos_ids is 184.*; the target's tokens are 0 to 49151"):
        tiny.generate("x", eos_ids=[2**64])
    least = tiny.generate("x", temperature=1.0, top_p=1e-46, seed=1, max_new_tokens=8)
    assert least.token_ids == tiny.generate("x", max_new_tokens=8).token_ids, "the best token is always kept"
    with pytest.raises(UserError, match=r"temperature is 1000.*; a finite number is needed"):
        tiny.generate("x", temperature=10**400)
