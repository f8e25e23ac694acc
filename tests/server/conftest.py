from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longspec import LongSpec
from tests.server.live import Live, live


@pytest.fixture
def tiny_server(tiny_folder: Path) -> Iterator[Callable[..., Live]]:
    """Starts servers of the tiny target, which answers one sequence at a time."""
    model = LongSpec.from_pretrained(
        str(tiny_folder), dtype="float32", device="cpu", calibrate=False, max_rows=1
    )
    stack = []

    def start(*arguments: Any, **options: Any) -> Live:
        stack.append(live(model, *arguments, **options))
        return stack[-1].__enter__()

    yield start
    for one in stack:
        one.__exit__(None, None, None)
