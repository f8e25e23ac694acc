"""Kernels that are launched while the one before still runs, so that only the first launch is waited for.

A step of a small model is some hundred short kernels in a row. On Hopper and later each may be started early:
it says at once that the next one may come, and waits before it touches memory until the last one is done.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_turn(OVERLAP: tl.constexpr) -> None:
    """The first line of a kernel that is launched with `overlap`."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


def overlap(device: torch.device) -> dict[str, Any]:
    """The launch's options: what the GPU can, and what tells the kernel."""
    return {"OVERLAP": True, "launch_pdl": True} if _can(device) else {"OVERLAP": False}


@cache
def _can(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
