"""One progress bar on standard error, silent where nobody looks."""

import contextlib
import sys
from collections.abc import Callable, Iterator

Advance = Callable[[int], None]


@contextlib.contextmanager
def byte_bar(label: str, total: int, show: bool) -> Iterator[Advance]:
    """Show a bar of `total` bytes when `show` and standard error is a terminal; yields `advance(bytes)`."""
    with _bar(label, total, show, in_bytes=True) as advance:
        yield advance


@contextlib.contextmanager
def count_bar(label: str, total: int, show: bool = True) -> Iterator[Advance]:
    """The same for `total` things of one kind; yields `advance(number)`."""
    with _bar(label, total, show, in_bytes=False) as advance:
        yield advance


@contextlib.contextmanager
def token_bar(label: str, total: int, show: bool = True) -> Iterator[Callable[[int, float], None]]:
    """A bar of tokens with their speed; yields `update(tokens so far, tokens per second)`."""
    if not (show and sys.stderr.isatty()):
        yield lambda done, speed: None
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    speed = TextColumn("{task.fields[speed]:,.0f} tokens/s")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        speed,
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total, speed=0.0)
        yield lambda done, speed: progress.update(task, completed=done, speed=speed)


@contextlib.contextmanager
def _bar(label: str, total: int, show: bool, in_bytes: bool) -> Iterator[Advance]:
    if not (show and sys.stderr.isatty()):
        yield lambda number: None
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
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda number: progress.advance(task, number)
