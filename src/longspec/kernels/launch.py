"""How kernels are launched: while the one before still runs, and compiled side by side.

A step of a small model is some hundred short kernels in a row. On Hopper and later each may be started early:
it prepares what does not depend on the others, waits until the last one is done, and then lets the next one
in. So whatever was written two kernels before, or earlier, is there from the beginning.

A kernel is compiled when it is first launched, while the next one waits. `compile_for` goes ahead and has all
that some work launches compiled at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton import AsyncCompileMode
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longspec.kernels.tiling import is_hopper

# Each compilation takes a processor, and some hundred megabytes.
_MOST_AT_ONCE = 16
_only_compiling = ContextVar("_only_compiling", default=False)


class launched:
    """Decorates a kernel that the host launches, by `kernel[grid](...)`, so that `compile_for` finds it."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if _only_compiling.get():
            return partial(self._kernel.warmup, grid=grid)
        launch: Callable[..., Any] = self._kernel[grid]
        return launch


def compile_for(works: Iterable[Callable[[], object]]) -> None:
    """Compile the kernels that the works launch, side by side; the works run, but the kernels do not.

    What they would have written stays as it is, or is arbitrary where it was just allocated: no work is fit
    for this that looks something up by their results.
    """
    # In a context of its own, for others may be launching meanwhile, and an error must leave nothing behind.
    copy_context().run(_compile, works)


def _compile(works: Iterable[Callable[[], object]]) -> None:
    _only_compiling.set(True)
    num_threads = min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads) as pool, AsyncCompileMode(pool):
        for work in works:
            work()


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
    return {"OVERLAP": True, "launch_pdl": True} if is_hopper(device) else {"OVERLAP": False}
