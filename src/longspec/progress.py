"""One progress bar on standard error, silent where nobody looks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[[int], None]


@contextlib.contextmanager
def byte_bar(label: str, total: int, show: bool) -> Iterator[Advance]:
    """Show a bar of `total` bytes when `show` and standard error is a terminal; yields `advance(bytes)`."""
    with _bar(label, total, show, in_bytes=True) as update:
        yield lambda number: update(advance=number)


@contextlib.contextmanager
def count_bar(label: str, total: int, show: bool = True) -> Iterator[Advance]:
    """The same for `total` things of one kind; yields `advance(number)`."""
    with _bar(label, total, show) as update:
        yield lambda number: update(advance=number)


@contextlib.contextmanager
def token_bar(label: str, total: int, show: bool = True) -> Iterator[Callable[[int, float], None]]:
    """A bar of tokens with their speed; yields `update(tokens so far, tokens per second)`."""
    with _bar(label, total, show) as update:
        yield lambda done, speed: update(completed=done, speed=f"{speed:,.0f} tokens/s")


@contextlib.contextmanager
def _bar(label: str, total: int, show: bool, in_bytes: bool = False) -> Iterator[Callable[..., Any]]:
    """Yields what takes the changes of rich's task; `speed` is a text that stands behind the amount."""
    if not (show and sys.stderr.isatty()):
        yield lambda **changes: None
        return

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    speed = TextColumn("{task.fields[speed]}")
    columns = (TextColumn("{task.description}"), BarColumn(), amount, speed, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total, speed="")
        yield lambda **changes: progress.update(task, **changes)
