"""A server in this process, on a port of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from longspec import LongSpec
from longspec.server.run import address_of, bind, make_server, run_server
from longspec.server.service import Limits, Service


@dataclass(frozen=True)
class Live:
    """Where it is."""

    address: str
    service: Service

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=60)

    @property
    def model(self) -> LongSpec:
        return self.service.model

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held for anyone."""
        scheduler = self.model.engine.scheduler
        return not (scheduler.seats or scheduler.waiting or scheduler.pool.num_held or self.service.num_open)


@contextmanager
def live(
    model: LongSpec, limits: Limits | None = None, keys: Sequence[str] = (), **method: Any
) -> Iterator[Live]:
    ready = threading.Event()
    service = Service(model, method, limits or Limits())
    server = make_server(service, keys, ready.set, grace_seconds=5)
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=run_server, args=(server, listener))
        thread.start()
        try:
            assert ready.wait(20)
            yield Live(address_of(listener), service)
        finally:
            server.should_exit = True
            thread.join()
