"""One progress bar on standard error, silent where nobody looks."""

import contextlib
import sys
from collections.abc import Callable, Iterator

Advance = Callable[[int], None]


@contextlib.contextmanager
def byte_bar(label: str, total: int, show: bool) -> Iterator[Advance]:
    """Show a bar of `total` bytes when `show` and standard error is a terminal; yields `advance(bytes)`."""
    if not (show and sys.stderr.isatty()):
        yield lambda num_bytes: None
        return

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)
