"""The messages between rank 0 and the other ranks. They are pickled, because all ranks are our processes."""

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
    """A rank's first message."""

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
    """Make a device of this size."""

    size: EngineSize
    num_nodes: int
    exact: bool


@dataclass(frozen=True)
class Call:
    """Call this method of the device."""

    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Ping:
    """Answer with the same message, to show that you are alive."""


@dataclass(frozen=True)
class Ready:
    """The part is loaded, and `free` bytes are left on the device."""

    free: int


@dataclass(frozen=True)
class Failed:
    """This rank ends, for this reason."""

    reason: str


Order = Load | Open | Call | Ping | None
"""A message from rank 0; None: end."""
Answer = Hello | Ping | Ready | Failed


def send(link: Connection, message: Order | Answer) -> None:
    """Send one message. `Connection.send` would put tensors into shared memory."""
    link.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(link: Connection) -> Any:
    """The next message; raises EOFError or OSError where the other side is gone."""
    return pickle.loads(link.recv_bytes())


def on_every_rank(method: M) -> M:
    """Decorate a method of `Device` that all ranks must call: rank 0 first sends the call to the others.

    Arguments are passed by position and are pickled.
    """

    @wraps(method)
    def run(self: Any, *arguments: Any) -> Any:
        work = partial(method, self, *arguments)
        return work() if self.ranks is None else self.ranks.lead(method.__name__, arguments, work)

    return cast("M", run)
