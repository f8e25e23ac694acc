"""Capturing work in CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

# A process records one graph at a time.
_turn = threading.Lock()


def capture(
    works: Sequence[Callable[[], object]], device: torch.device, pool: Any = None
) -> list[torch.cuda.CUDAGraph]:
    """A graph of each of the works. Graphs with the same `pool` share their memory, so a replay overwrites
    what another graph left there.

    Each work runs twice before it is recorded. In the first run our kernels are only compiled, those of all
    works in parallel. So running a work once more must change nothing, and a work must not use a kernel's
    result as an index. The tensors that it reads and writes must keep their addresses while the graph lives.

    Other threads may launch, allocate and wait for their own streams meanwhile, but not for the whole device.
    """
    from longspec.kernels.launch import compile_for

    with _turn, torch.cuda.device(device):
        aside = _aside(device)
        aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(aside):
                compile_for(works)
                # In this run libraries allocate their workspaces.
                for work in works:
                    work()
        finally:
            torch.cuda.current_stream().wait_stream(aside)
        return [_record(work, aside, pool) for work in works]


def _record(work: Callable[[], object], stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with _uncollected(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Stop garbage collection, because freeing an object may wait for the device, which breaks a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures, because libraries keep a workspace for every stream."""
    return torch.cuda.Stream(device)
