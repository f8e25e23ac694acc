"""What rank 0 says to the other ranks, and what they answer: pickled, because all of them are ours."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

import torch

from longspec.engine.load import LoadPlan
from longspec.engine.memory import EngineSize

M = TypeVar("M", bound=Callable[..., Any])


@dataclass(frozen=True)
class Hello:
    """What a rank says first."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Load:
    """Load a part of these models, and join the group of all ranks."""

    devices: tuple[torch.device, ...]
    plan: LoadPlan
    num_threads: int


@dataclass(frozen=True)
class Open:
    """Open a device of this size."""

    size: EngineSize
    num_nodes: int
    exact: bool


@dataclass(frozen=True)
class Call:
    """Do this with the device."""

    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Ping:
    """Say that you are alive."""


@dataclass(frozen=True)
class Ready:
    """The part is loaded, and so many bytes are left on the device."""

    free: int


@dataclass(frozen=True)
class Failed:
    """This rank ends, and why."""

    reason: str


Order = Load | Open | Call | Ping | None
"""What rank 0 says; None: end."""
Answer = Hello | Ping | Ready | Failed


def send(link: Connection, message: Order | Answer) -> None:
    """Send one message. Not by `Connection.send`, which would put tensors into shared memory."""
    link.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(link: Connection) -> Any:
    """The next message; raises EOFError or OSError where the other side is gone."""
    return pickle.loads(link.recv_bytes())


def on_every_rank(method: M) -> M:
    """A method that every rank calls, where several share a target: rank 0 tells the others to, first.

    What it is called with must be values that cross to other processes, by position.
    """

    @wraps(method)
    def run(self: Any, *arguments: Any) -> Any:
        work = partial(method, self, *arguments)
        return work() if self.ranks is None else self.ranks.lead(method.__name__, arguments, work)

    return cast("M", run)
