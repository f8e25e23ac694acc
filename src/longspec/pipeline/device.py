"""What the plan must know of the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from longspec.models.placement import device_name, free_memory
from longspec.pipeline.plan import DeviceFacts

# Sizes that keep a device busy, and that a CPU does in a fraction of a second.
_MATRIX = {"cuda": 8192, "cpu": 1024}
_COPIED = {"cuda": 2**30, "cpu": 2**26}
_REPEATS = 5


def measure_device(device: torch.device, dtype: torch.dtype) -> DeviceFacts:
    """The device's memory and speed, by a matrix product and a copy."""
    size, copied = _MATRIX[device.type], _COPIED[device.type]
    free = free_memory(device)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    product = torch.empty_like(matrix)
    seconds = _fastest(lambda: torch.mm(matrix, matrix, out=product), device)
    data = torch.ones(copied, device=device, dtype=torch.uint8)
    other = torch.empty_like(data)
    return DeviceFacts(
        type=device.type,
        name=device_name(device),
        free_memory=free,
        flops=2 * size**3 / seconds,
        bandwidth=2 * copied / _fastest(lambda: other.copy_(data), device),
        itemsize=dtype.itemsize,
    )


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs."""
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)
