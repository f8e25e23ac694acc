"""Measures what the plan must know of the device."""

from __future__ import annotations

import torch

from longspec.bench.environment import copy_bandwidth, now
from longspec.models.placement import device_name, free_memory
from longspec.pipeline.plan import DeviceFacts

# The size of a matrix product that keeps the device busy and takes only a fraction of a second.
_MATRIX = {"cuda": 8192, "cpu": 1024}
_REPEATS = 5


def measure_device(device: torch.device, dtype: torch.dtype) -> DeviceFacts:
    """The device's memory and speed, by a matrix product and a copy."""
    size, free = _MATRIX[device.type], free_memory(device)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    product = torch.empty_like(matrix)
    times = []
    for _ in range(_REPEATS):
        started = now(device)
        torch.mm(matrix, matrix, out=product)
        times.append(now(device) - started)
    return DeviceFacts(
        type=device.type,
        name=device_name(device),
        free_memory=free,
        flops=2 * size**3 / min(times),
        bandwidth=copy_bandwidth(device),
        itemsize=dtype.itemsize,
    )
