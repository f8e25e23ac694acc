"""Rounding to fp8 in Triton's interpreter, whose own is wrong: 1.97 becomes 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def correct_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round as hardware does, but for numbers beyond 448: they become nan, as the format
    has it, so that a kernel must saturate by itself."""
    convert: Callable[..., Any] = interpreter._convert_float

    def converted(data: Any, source: Any, goal: Any, rounding: Any) -> Any:
        if goal != tl.float8e4nv:
            return convert(data, source, goal, rounding)
        assert data.dtype in (np.float16, np.float32), data.dtype
        numbers = torch.from_numpy(np.ascontiguousarray(data)).float()
        numbers = numbers.masked_fill(numbers.abs() > 448, torch.nan)
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)
