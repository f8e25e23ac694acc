"""How many threads compute on a CPU: no more than other programs leave processors free.

The threads of a product wait for each other, and spin while they do. If another program takes the processor
of one, all of them wait for it, hundreds of times in a step. With one thread fewer nobody waits.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch


class ProcessorLoad:
    """Watches how much of this program's processors other programs use."""

    def __init__(self) -> None:
        self.num_processors = len(_own_processors())
        self.restart()

    def restart(self) -> None:
        self._started = _now()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started[0]

    def others(self) -> float:
        """The processors that other programs have used since the start, on average."""
        wall, everyone, ours = (now - then for now, then in zip(_now(), self._started, strict=True))
        return max(0.0, everyone - ours) / max(wall, 1e-9)


class FreeThreads:
    """A context in which torch has as many threads as there are free processors.

    `adapt` looks now and then. At the end, torch has the threads that it had before; they are also the most.
    """

    # Seconds between two looks. The system counts in hundredths of a second.
    _EVERY = 0.2

    def __init__(self, is_adaptive: bool) -> None:
        """If not adaptive, nothing is changed."""
        self._load = ProcessorLoad() if is_adaptive else None
        self._before = self._wanted = 1

    def __enter__(self) -> FreeThreads:
        before = torch.get_num_threads()
        if before != self._before:
            self._before = self._wanted = before
        return self

    def adapt(self) -> None:
        """Call this before each piece of work, in the thread that does it."""
        if self._load is None or self._before == 1:
            return
        if self._load.seconds >= self._EVERY:
            free = round(self._load.num_processors - self._load.others())
            self._wanted = max(1, min(self._before, free))
            self._load.restart()
        if torch.get_num_threads() != self._wanted:
            torch.set_num_threads(self._wanted)

    def watch(self) -> None:
        """Adapt once, to what other programs do now."""
        if self._load is not None:
            self._load.restart()
            time.sleep(self._EVERY)
            self.adapt()

    def __exit__(self, *_: object) -> None:
        if torch.get_num_threads() != self._before:
            torch.set_num_threads(self._before)


def _own_processors() -> set[int]:
    """The numbers of the processors that this program may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _now() -> tuple[float, float, float]:
    """Seconds: of the clock, of our processors at work, and of those at work for this program."""
    ours = time.process_time()
    names = {f"cpu{number}" for number in _own_processors()}
    ticks = 0
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            name, *counts = line.split()
            if name in names:
                user, nice, system, _, _, *interrupts = map(int, counts[:8])
                ticks += user + nice + system + sum(interrupts)
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), ours
    except (OSError, ValueError):
        return time.monotonic(), ours, ours  # another system: taken to be quiet
