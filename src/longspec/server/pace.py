"""How often streams are written to, when there are many of them."""

from __future__ import annotations

import asyncio
import time

# Seconds of rest for each second of writing, and at most: what took longer was not the streams' doing.
_REST, _LONGEST_REST = 3.0, 0.1


class Pacer:
    """Wakes streams that have news: all at once, and then none for three times as long as that took.

    With few streams that is no time at all. With many of them, what came meanwhile goes out as one event, and
    most of the event loop's time is left for new requests. Otherwise those would wait for their first tokens,
    because streams take all the time that there is: the more often they are written to, the less each brings.
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Event] = set()
        self._rests = False

    def wake(self, stream: asyncio.Event) -> None:
        """Set the event, now or soon."""
        self._waiting.add(stream)
        if not self._rests:
            self._rests = True
            asyncio.get_running_loop().call_soon(self._wake_all)

    def _wake_all(self) -> None:
        for stream in self._waiting:
            stream.set()
        self._waiting.clear()
        # The loop calls in order, so this comes when each of them has had its turn. Its own clock may stand
        # still in between.
        asyncio.get_running_loop().call_soon(self._rest, time.perf_counter())

    def _rest(self, begun: float) -> None:
        seconds = min(_REST * (time.perf_counter() - begun), _LONGEST_REST)
        asyncio.get_running_loop().call_later(seconds, self._end_rest)

    def _end_rest(self) -> None:
        self._rests = bool(self._waiting)
        if self._waiting:
            self._wake_all()
