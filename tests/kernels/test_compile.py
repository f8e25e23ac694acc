"""Every kernel compiles for a GPU: what the interpreter lets pass, the compiler may refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longspec.kernels

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("methods", ["tree", pytest.param("all", marks=pytest.mark.full)])
def test_every_kernel_compiles_for_hopper(methods: str, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # a tenth of the time
    command = (sys.executable, "-m", "tests.kernels.compile_all", methods)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = {
        f"{name} of longspec.kernels.{path.stem}"
        for path in Path(longspec.kernels.__path__[0]).glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert set(done.stdout.splitlines()) == written
