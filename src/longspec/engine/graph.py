"""Work that is launched once and then replayed as a whole: a CUDA graph."""

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
    """Record what each of the works launches, ready to be replayed. Graphs with the same `pool` share their
    memory, so that what one leaves there is gone when another is replayed.

    Each runs twice beforehand. In the first run our kernels are only compiled, those of all works side by
    side. So a work must be at rest: doing it once more must change nothing, nor may it look anything up by
    what our kernels compute. What it reads and writes must keep its place in memory for as long as the graph
    is replayed.

    Other threads may launch, allocate and wait for their own streams meanwhile, but not for the whole device.
    """
    from longspec.kernels.launch import compile_for

    with _turn, torch.cuda.device(device):
        aside = _aside(device)
        aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(aside):
                compile_for(works)
                # Libraries make their workspaces now.
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
    """Whatever is collected may wait for the device as it goes, which breaks a capture: it has to stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)
