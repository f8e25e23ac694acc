"""From a loaded model to a server that listens."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from longspec.errors import UserError
from longspec.server.app import make_app
from longspec.server.service import Service

# Threads take turns this often: the one that leads the engine must not wait for the event loop's work.
_SWITCH_SECONDS = 0.0005
# Connections that may wait to be taken on.
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A socket that is ours and does not listen yet: an address that is taken is told before a long load."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        raise UserError(
            f"cannot listen at {host} port {port}: {error.strerror}; take another --port"
        ) from error
    return made


def address_of(listener: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}"


def read_api_keys(path: str) -> list[str]:
    """The keys of a file, one a line."""
    keys = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not keys:
        raise UserError(f"{path} holds no key; write at least one line")
    return keys


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def make_server(
    service: Service,
    api_keys: Sequence[str] = (),
    on_ready: Callable[[], None] = lambda: None,
    grace_seconds: int = 30,
) -> uvicorn.Server:
    """A server that takes nobody new on after a signal; who is being answered then has so long."""
    config = uvicorn.Config(
        make_app(service, api_keys),
        log_level="error",  # a malformed request is the client's affair
        access_log=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=grace_seconds,
        server_header=False,
        lifespan="on",
    )
    return _Server(config, on_ready)


def run_server(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until a signal comes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        server.run(sockets=[listener])
    finally:
        sys.setswitchinterval(before)
