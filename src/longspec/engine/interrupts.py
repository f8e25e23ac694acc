"""Delaying Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def undisturbed() -> Iterator[list[Any]]:
    """Delay Ctrl-C to the end of the block. The list is not empty if it was pressed.

    An interrupted turn would leave rows and pages half written, and an interrupted leader its lock taken.
    """
    pressed: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    # Only the main thread is interrupted, and only if the signal has a handler.
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield pressed
        return
    signal.signal(signal.SIGINT, lambda *what: pressed.append(what))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        before(*pressed[0])
