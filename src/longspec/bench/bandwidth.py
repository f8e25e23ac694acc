"""How fast memory is here: the floor under every step that has to read weights and KV."""

from __future__ import annotations

import torch

from longspec.bench.clock import now

_COPIES, _REPEATS = 8, 4


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device)
    goal = torch.empty_like(source)
    torch.neg(source, out=goal)
    fastest = 0.0
    for _ in range(_REPEATS):
        started = now(device)
        for _ in range(_COPIES):
            # By a kernel that changes what it copies: a plain copy may be left to a slower engine.
            torch.neg(source, out=goal)
        fastest = max(fastest, _COPIES / (now(device) - started))
    return fastest * 2 * source.numel() * source.element_size()
