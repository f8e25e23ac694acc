"""Work that is launched once and then replayed as a whole: a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

# The first run compiles kernels and makes workspaces; the second finds everything in place.
_WARM_UP = 2


def capture(work: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """Record what `work` launches, ready to be replayed.

    It runs a few times beforehand, so it must be at rest: doing it once more must change nothing. What it
    reads and writes must keep its place in memory for as long as the graph is replayed.
    """
    with torch.cuda.device(device):
        aside = _aside(device)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=aside):
            work()
    return graph


@cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)
