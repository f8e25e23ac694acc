"""The machine that is measured: what it is, its clock, its memory, and how fast that memory is."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import longspec
from longspec.api import LongSpec
from longspec.models.placement import device_name

_COPIES, _REPEATS = 8, 4


def environment(model: LongSpec) -> dict[str, Any]:
    """What the figures depend on besides the settings."""
    target = model.target
    return {
        "target": model.name,
        "draft": model.draft_name,
        "max_length": model.engine.max_length,
        "weights": target.weights,
        "kv_dtype": target.kv,
        **machine(target.device, target.dtype),
    }


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The part of the environment that does not depend on the model."""
    facts: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "processor": device_name(device),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "longspec": longspec.__version__,
        "commit": commit(),
    }
    if device.type == "cuda":
        facts["cuda"] = torch.version.cuda
    return facts


def load_average() -> float:
    """Programs that wanted a core in the last minute; more than our threads means that others ran too."""
    return round(os.getloadavg()[0], 2)


def commit() -> str | None:
    """The commit of a checkout, with a plus where files are changed; None for an installed package."""
    folder = Path(longspec.__file__).parent

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(folder), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):
            return None  # installed inside another repository, such as in its virtual environment
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def command_line() -> str:
    """How this program was started; `python -m longspec` is `longspec`."""
    name = Path(sys.argv[0]).name
    return shlex.join(["longspec" if name == "__main__.py" else name, *sys.argv[1:]])


class PeakMemory:
    """The most bytes in use since this object was made: of the GPU, or of the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        else:
            self._forget_peak()
            self.before = self._status("VmRSS")

    @property
    def peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return self._status("VmHWM")

    def _forget_peak(self) -> None:
        # Some containers forbid it; the peak is then the peak since the process began.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def _status(self, field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def now(device: torch.device) -> float:
    """The time in seconds, after the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes: what bounds a step that reads weights and KV."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device)
    goal = torch.empty_like(source)
    torch.neg(source, out=goal)
    fastest = 0.0
    for _ in range(_REPEATS):
        started = now(device)
        for _ in range(_COPIES):
            # A kernel that computes, because a plain copy may be done by a slower copy engine.
            torch.neg(source, out=goal)
        fastest = max(fastest, _COPIES / (now(device) - started))
    return fastest * 2 * source.numel() * source.element_size()
