"""The threads of a CPU's rounds give way to other programs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from longspec.engine.threads import FreeThreads, ProcessorLoad
from tests.decoding.scripted import ask, tiny_engine, tiny_target


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def busy_programs() -> Iterator[None]:
    """One for each processor."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(ProcessorLoad().num_processors)
    ]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.usefixtures("four_threads", "busy_programs")
def test_threads_give_way_to_busy_programs_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with FreeThreads(is_adaptive=True) as threads:
        time.sleep(1)
        threads.adapt()
        assert torch.get_num_threads() == 1
        monkeypatch.setattr(ProcessorLoad, "others", lambda self: self.num_processors - 3.2)
        threads.watch()
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 4
    with FreeThreads(is_adaptive=False) as threads:
        threads.watch()
        assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_an_engine_uses_the_free_processors_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says does not depend on the threads."""
    prompts, engine = [[3, 1, 4, 1, 5]] * 2, tiny_engine(tiny_target(3))
    expected = [one.tokens for one in ask(engine, prompts, new=12)]
    seen: set[int] = set()
    work = engine._work

    def watched() -> None:
        seen.add(torch.get_num_threads())
        work()

    monkeypatch.setattr(engine, "_work", watched)
    monkeypatch.setattr(ProcessorLoad, "others", lambda self: self.num_processors - 2.0)
    monkeypatch.setattr(ProcessorLoad, "seconds", 1.0)
    assert [one.tokens for one in ask(engine, prompts, new=12)] == expected
    assert seen == {2}
    assert torch.get_num_threads() == 4
