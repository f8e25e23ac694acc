"""How kernels are launched: each starts while the previous one still runs, and they are compiled in parallel.

A step of a small model is some hundred short kernels, one after the other. On Hopper and later a kernel may
start early (programmatic dependent launch): it does what does not depend on the previous kernel, waits until
that one is done, and then lets the next kernel start. So what was written two or more kernels before can be
read from the beginning.

Triton compiles a kernel at its first launch, one after the other. `compile_for` compiles all kernels of some
work at the same time.
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

# Each compilation needs a processor and some hundred megabytes.
_MOST_AT_ONCE = 16
_only_compiling = ContextVar("_only_compiling", default=False)


class launched:
    """Decorates a kernel that the host launches with `kernel[grid](...)`, so that `compile_for` finds it."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if _only_compiling.get():
            return partial(self._kernel.warmup, grid=grid)
        launch: Callable[..., Any] = self._kernel[grid]
        return launch


def compile_for(works: Iterable[Callable[[], object]]) -> None:
    """Compile the kernels that the works launch, in parallel. The works run, but the kernels do not.

    So the kernels' outputs keep old or arbitrary values; a work must not use them as an index.
    """
    # In its own context, because other threads may launch at the same time, and an error must not leave the
    # flag set.
    copy_context().run(_compile, works)


def _compile(works: Iterable[Callable[[], object]]) -> None:
    _only_compiling.set(True)
    num_threads = min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads) as pool, AsyncCompileMode(pool):
        for work in works:
            work()


@triton.jit
def await_turn(OVERLAP: tl.constexpr) -> None:
    """Wait until the previous kernel is done, then let the next one start. Call it before the first access to
    what the previous one may touch."""
    await_previous(OVERLAP)
    start_next(OVERLAP)


@triton.jit
def await_previous(OVERLAP: tl.constexpr) -> None:
    """Wait until the previous kernel is done."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def start_next(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel start. Call it after `await_previous`, because the next kernel may read what the
    previous one wrote before it waits for this one."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def fetch(pointers: tl.tensor, OVERLAP: tl.constexpr) -> None:
    """Start to load the 128 bytes around each pointer into the L2 cache, without waiting.

    Useful before `await_turn`: the weights then arrive while the previous kernel still runs.
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
    """The launch options that let a kernel start early, if the GPU can do that."""
    return {"OVERLAP": True, "launch_pdl": True} if is_hopper(device) else {"OVERLAP": False}
