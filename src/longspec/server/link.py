"""The front's side of the link to the engine: rows that fill up while the engine answers them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable
from itertools import count

from longspec.engine.sequence import Sequence
from longspec.server.wire import Ask, AskStatus, Cancel, End, News, Packet, Row, Status, framed, read_message

_LOST = End("closed", "EngineLost")


class Link:
    """Sends requests to the engine and receives its news, on one event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._numbers = count()
        self._open: dict[int, tuple[Row, Callable[[Row], None]]] = {}
        self._waiting: deque[asyncio.Future[Status]] = deque()
        self._is_ending = False
        self.is_lost = False
        """Whether the engine's process is gone."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def rows(self) -> list[Row]:
        """The rows that the engine is answering."""
        return [row for row, _ in self._open.values()]

    async def connect(self, on_lost: Callable[[], None]) -> None:
        """Start reading; `on_lost` is called when the engine's process is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._sock, limit=1 << 20)
        self._on_lost = on_lost
        self._task = asyncio.create_task(self._read(reader))

    async def close(self) -> None:
        self._task.cancel()
        self._writer.close()

    def ask(
        self,
        sequences: list[Sequence],
        stop: tuple[str, ...],
        grammar: str | None,
        on_news: Callable[[Row], None],
    ) -> list[tuple[int, Row]]:
        """Ask for answers to sequences; `on_news` is called with a row that has news."""
        numbered = [(next(self._numbers), sequence) for sequence in sequences]
        rows = [(number, Row(len(one.prompt), one.seed, one.num_logprobs)) for number, one in numbered]
        self._open |= {number: (row, on_news) for number, row in rows}
        for sequence in sequences:
            sequence.stop_after = None  # a function is not sent; `Host` makes its own from `stop`
        if self._is_ending:
            self._end(End("closed"))
        else:
            self._send(Ask(numbered, stop, grammar))
        return rows

    def cancel(self, numbers: list[int]) -> None:
        left = [number for number in numbers if self._open.pop(number, None) is not None]
        if left:
            self._send(Cancel(left))

    def end_all(self) -> None:
        """End all answers, also those that are asked for from now on. Their clients are told that the server
        shuts down."""
        self._is_ending = True
        numbers = list(self._open)
        self._end(End("closed"))
        if numbers:
            self._send(Cancel(numbers))

    async def status(self) -> Status:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._send(AskStatus())
        return await future

    def _send(self, message: Packet) -> None:
        if self.is_lost:
            raise ConnectionError("the engine's process is gone")
        self._writer.write(framed(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(await read_message(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._lose()

    def _take(self, message: News | Status) -> None:
        if isinstance(message, Status):
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(message)
            return
        now = time.perf_counter()
        for number, tokens, depths, copied, logprobs, end in message.rows:
            if number not in self._open:
                continue  # the front has cancelled it
            row, on_news = self._open[number]
            row.tokens += tokens
            row.depths += depths
            row.copied += copied
            row.logprobs += logprobs
            row.times.append(now)
            row.end = end
            if end is not None:
                del self._open[number]
            on_news(row)

    def _end(self, end: End) -> None:
        for row, on_news in self._open.values():
            row.end = end
            on_news(row)
        self._open.clear()

    def _lose(self) -> None:
        self.is_lost = True
        self._end(_LOST)
        for future in self._waiting:
            future.cancel()
        self._on_lost()
