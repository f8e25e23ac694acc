"""Progress bars."""

from __future__ import annotations

import threading

import pytest
from rich.live import _RefreshThread

from longspec.progress import rich_bar


def test_ctrl_c_while_a_bar_starts_leaves_nothing_that_redraws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start, drawing = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        drawing.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(_RefreshThread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), rich_bar("measuring", 3):
        pass
    (thread,) = drawing
    thread.join(5)
    assert not thread.is_alive()
