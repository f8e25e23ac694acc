"""Copying numbers from the host to the device and back without waiting for the work that is queued."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Report:
    """A tensor that is being copied to the host."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = values.clone()

    def read(self) -> Any:
        """Wait for the values; returns them as lists."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


def to_device(values: list[Any] | Tensor, device: torch.device) -> Tensor:
    """Copy numbers to the device, from pinned memory, because other copies wait for all queued work."""
    made = values if isinstance(values, Tensor) else torch.tensor(values, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def put_rows(
    whole: Tensor, slots: Sequence[int], rows: Sequence[list[int]], starts: Sequence[int] | None = None
) -> Tensor:
    """Write numbers into rows of `whole` [B, S], at `starts` or at the beginning, with one copy.

    Returns the numbers of all rows, end to end.
    """
    # Through an array, because torch.tensor takes several times as long for a list.
    flat = array("q", chain.from_iterable(rows))
    width, starts = whole.shape[1], starts or [0] * len(rows)
    places = [
        slot * width + np.arange(start, start + len(row))
        for slot, start, row in zip(slots, starts, rows, strict=True)
    ]
    both = np.stack((np.frombuffer(flat, np.int64), np.concatenate(places)))
    numbers, goals = to_device(torch.from_numpy(both), whole.device)
    whole.view(-1)[goals] = numbers.to(whole.dtype)
    return numbers
