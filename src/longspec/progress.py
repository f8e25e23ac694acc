"""Progress bars on standard error, if it is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[[int], None]


@contextlib.contextmanager
def count_bar(label: str, total: int, show: bool = True, in_bytes: bool = False) -> Iterator[Advance]:
    """A bar of `total` items, or bytes, if `show` and this is a terminal; yields `advance(number)`."""
    if not (show and sys.stderr.isatty()):
        yield lambda number: None
        return
    with rich_bar(label, total, in_bytes=in_bytes) as update:
        yield lambda number: update(advance=number)


@contextlib.contextmanager
def token_bar(label: str, total: int, show: bool = True) -> Iterator[Callable[[int, float], None]]:
    """A bar of tokens with their speed; yields `update(tokens so far, tokens per second)`."""
    if not (show and sys.stderr.isatty()):
        yield lambda done, speed: None
        return
    with rich_bar(label, total, "{task.fields[speed]:,.0f} tokens/s", speed=0.0) as update:
        yield lambda done, speed: update(completed=done, speed=speed)


@contextlib.contextmanager
def rich_bar(
    label: str,
    total: int,
    text: str = "",
    *,
    done: int = 0,
    in_bytes: bool = False,
    keep: bool = False,
    **fields: Any,
) -> Iterator[Callable[..., None]]:
    """A bar followed by `text`, which shows `fields`; yields rich's `update` for it.

    With `keep` the bar stays on the screen when it is done.
    """
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
    remaining = TimeRemainingColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, remaining, TextColumn(text))
    progress = Progress(*columns, console=Console(stderr=True), transient=not keep)
    try:
        # Not by `with`: after Ctrl-C inside its start, nobody would stop the thread that redraws it.
        progress.start()
        task = progress.add_task(label, total=total, completed=done, **fields)
        yield lambda **changes: progress.update(task, **changes)
    finally:
        progress.stop()
