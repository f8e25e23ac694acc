"""The messages between the two processes of a server. They are pickled, because both processes are ours.

One process leads the engine and does nothing else, because Python runs one thread at a time. The other one,
the front, talks HTTP and turns texts into tokens and back.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from longspec.api import SequenceMaker
from longspec.engine.engine import Statistics
from longspec.engine.sequence import Logprobs, Sequence

_SIZE = struct.Struct("!Q")


@dataclass(frozen=True)
class Facts:
    """The facts about the model that the front needs; the engine's first message."""

    name: str
    draft_name: str | None
    device: str
    dtype: str
    weights: str
    kv_dtype: str
    max_rows: int
    maker: SequenceMaker


@dataclass(frozen=True)
class Ask:
    """Answer these sequences. They are sent without the functions that they may hold."""

    rows: list[tuple[int, Sequence]]
    """Each sequence with a number that the front has chosen."""
    stop: tuple[str, ...]
    grammar: str | None


@dataclass(frozen=True)
class Cancel:
    """Stop these sequences, because no client waits for them."""

    numbers: list[int]


@dataclass(frozen=True)
class AskStatus:
    """Send a `Status`."""


@dataclass(frozen=True)
class Status:
    """The state of the engine now."""

    num_running: int
    num_waiting: int
    statistics: Statistics


@dataclass(frozen=True)
class End:
    """How a sequence ended."""

    finish_reason: str
    error: str | None = None
    is_users_fault: bool = False
    num_shared: int = 0
    num_steps: int = 0
    """Rounds that proposed tokens."""
    num_drafted: int = 0
    """The most tokens that these rounds proposed."""


@dataclass(frozen=True)
class News:
    """What sequences have emitted since the last message, after a turn of the engine."""

    rows: list[tuple[int, list[int], list[int], list[bool], list[Logprobs], End | None]]
    """Number, tokens, their depths, whether they were looked up, their logprobs, and the end if it came."""


Packet = Facts | Ask | Cancel | AskStatus | Status | News


@dataclass
class Row:
    """A sequence as the front sees it."""

    prompt_tokens: int
    seed: int
    num_logprobs: int | None
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    copied: list[bool] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When messages about it came."""
    num_counted: int = 0
    """Tokens that the metrics have counted."""
    end: End | None = None

    @property
    def finish_reason(self) -> str | None:
        """In the engine's words; None while it runs."""
        return None if self.end is None else self.end.finish_reason


def framed(message: Packet) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _SIZE.pack(len(body)) + body


def send(link: socket.socket, message: Packet) -> None:
    """Send one message, and wait until the system has taken it."""
    link.sendall(framed(message))


async def read_message(reader: asyncio.StreamReader) -> Any:
    """The next message; raises IncompleteReadError or ConnectionError if the other side is gone."""
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return pickle.loads(await reader.readexactly(size))


def receive(link: socket.socket) -> Any:
    """The next message; None if the other side is gone."""
    head = _read(link, _SIZE.size)
    body = None if head is None else _read(link, _SIZE.unpack(head)[0])
    return None if body is None else pickle.loads(body)


def _read(link: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        try:
            part = link.recv(min(size, 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
