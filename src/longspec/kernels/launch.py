"""Kernels that are launched while the one before still runs, so that only the first launch is waited for.

A step of a small model is some hundred short kernels in a row. On Hopper and later each may be started early:
it prepares what does not depend on the others, waits until the last one is done, and then lets the next one
in. So whatever was written two kernels before, or earlier, is there from the beginning.
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
    """Comes before the first access, in a kernel launched with `overlap`, to what the last one may touch."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch(pointers: tl.tensor, OVERLAP: tl.constexpr) -> None:
    """Have the 128 bytes around each pointer brought into the L2 cache, and wait for nothing.

    It pays before `await_turn`: a kernel that starts early has its weights on the way by then.
    """
    if OVERLAP:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def overlap(device: torch.device) -> dict[str, Any]:
    """The launch's options: what the GPU can, and what tells the kernel."""
    return {"OVERLAP": True, "launch_pdl": True} if _can(device) else {"OVERLAP": False}


@cache
def _can(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
