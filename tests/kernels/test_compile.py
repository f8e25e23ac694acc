"""Every kernel compiles for a GPU: what the interpreter lets pass, the compiler may refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import longspec.kernels

ROOT = Path(__file__).parents[2]


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = (sys.executable, "-m", "tests.kernels.compile_all")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = {
        f"{name} of longspec.kernels.{path.stem}"
        for path in Path(longspec.kernels.__path__[0]).glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert set(done.stdout.splitlines()) == written
