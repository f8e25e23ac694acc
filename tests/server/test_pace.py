"""Many streams leave time to new requests."""

from __future__ import annotations

import asyncio
import time

from longspec.server.pace import Pacer


async def wakes_in(seconds: float, busy: float) -> int:
    """How often a stream is woken that always has news and takes `busy` seconds of the loop each time."""
    pacer, news, num_wakes = Pacer(), asyncio.Event(), 0

    async def stream() -> None:
        nonlocal num_wakes
        while True:
            await news.wait()
            news.clear()
            num_wakes += 1
            time.sleep(busy)

    task = asyncio.create_task(stream())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pacer.wake(news)
        await asyncio.sleep(0.0005)
    task.cancel()
    return num_wakes


def test_streams_take_a_quarter_of_the_time() -> None:
    assert 2 <= asyncio.run(wakes_in(0.4, busy=0.02)) <= 0.4 / (4 * 0.02) + 1
    assert asyncio.run(wakes_in(0.4, busy=0.0)) > 20
