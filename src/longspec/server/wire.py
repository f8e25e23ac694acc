"""What the two processes of a server say to each other: pickled, because both are ours.

One process leads the engine and does nothing else, because Python runs one thread at a time. The other one
talks HTTP, and turns texts into tokens and back.
"""

from __future__ import annotations

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
    """What the front has to know of the engine; the first thing that it is told."""

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
    """Answer these. A sequence crosses without the functions that it may hold."""

    rows: list[tuple[int, Sequence]]
    """Each under a number that the front has chosen."""
    stop: tuple[str, ...]
    grammar: str | None


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for these any more."""

    numbers: list[int]


@dataclass(frozen=True)
class AskStatus:
    """Tell how the engine is."""


@dataclass(frozen=True)
class Status:
    """How it is."""

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
    """Rounds that proposed something."""
    num_drafted: int = 0
    """Tokens that they proposed, at most."""


@dataclass(frozen=True)
class News:
    """What sequences have said since they were last heard of, after a turn of the engine."""

    rows: list[tuple[int, list[int], list[int], list[bool], list[Logprobs], End | None]]
    """By number: tokens, their depths, whether they were looked up, their logprobs, and the end."""


Message = Facts | Ask | Cancel | AskStatus | Status | News


@dataclass
class Row:
    """A sequence as the front knows it."""

    prompt_tokens: int
    seed: int
    num_logprobs: int | None
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    copied: list[bool] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When something new came."""
    end: End | None = None

    @property
    def finish_reason(self) -> str | None:
        """In the engine's words; None while it runs."""
        return None if self.end is None else self.end.finish_reason


def framed(message: Message) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _SIZE.pack(len(body)) + body


def send(link: socket.socket, message: Message) -> None:
    """Send one, and wait until it is on its way."""
    link.sendall(framed(message))


def receive(link: socket.socket) -> Any:
    """The next one; None where the other side is gone."""
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
