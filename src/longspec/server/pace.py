"""How often the server writes to streams when there are many of them."""

from __future__ import annotations

import asyncio
import time

# Seconds of rest for each second of writing, and the longest rest: longer writes have another cause.
_REST, _LONGEST_REST = 3.0, 0.1


class Pacer:
    """Wakes all streams that have news at once, and then none for three times as long as writing took.

    With few streams the rest is very short. With many, the tokens that came meanwhile go out as one event, so
    that most of the event loop's time is left for new requests. Without the rest, streams would take all of
    the loop's time, in smaller and smaller events, and new requests would wait for their first tokens.
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
        # The event loop calls in order, so `_rest` runs when each stream has been written. The loop's own
        # clock may not advance in between.
        asyncio.get_running_loop().call_soon(self._rest, time.perf_counter())

    def _rest(self, begun: float) -> None:
        seconds = min(_REST * (time.perf_counter() - begun), _LONGEST_REST)
        asyncio.get_running_loop().call_later(seconds, self._end_rest)

    def _end_rest(self) -> None:
        self._rests = bool(self._waiting)
        if self._waiting:
            self._wake_all()
