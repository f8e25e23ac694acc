"""A server in this process, on a port of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from longspec import LongSpec
from longspec.server.host import Host
from longspec.server.link import Link
from longspec.server.run import FrontOptions, FrontServer, address_of, bind
from longspec.server.service import Limits, Service
from longspec.server.wire import receive


@dataclass(frozen=True)
class Live:
    """Where it is."""

    address: str
    service: Service
    model: LongSpec
    front: FrontServer

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=300)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held for anyone."""
        scheduler = self.model.engine.scheduler
        held = scheduler.seats or scheduler.waiting or scheduler.pool.num_held
        return not (held or self.service.num_open or self.service.link.num_open)


@contextmanager
def live(
    model: LongSpec,
    limits: Limits | None = None,
    keys: Sequence[str] = (),
    address: str = "127.0.0.1",
    names: Sequence[str] = (),
    grace_seconds: int = 5,
    **method: Any,
) -> Iterator[Live]:
    """Both sides of a server, each in a thread of its own instead of a process."""
    ready = threading.Event()
    ours, theirs = socket.socketpair()
    host = threading.Thread(target=Host(model, ours).serve)
    host.start()
    with ours, bind(address, 0) as listener:
        options = FrontOptions(limits or Limits(), tuple(keys), method, grace_seconds, address, tuple(names))
        service = Service(receive(theirs), Link(theirs), options.method, options.limits, options.names)
        server = FrontServer(service, listener, options, ready.set)
        front = threading.Thread(target=server.run, args=([listener],))
        front.start()
        try:
            assert ready.wait(20)
            yield Live(address_of(listener), service, model, server)
        finally:
            server.end()
            front.join()
            theirs.close()
            host.join()


def soon(is_so: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not is_so():
        time.sleep(0.01)
    return is_so()
