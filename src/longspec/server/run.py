"""The two processes of a server: one leads the engine, and the other one, the front, talks HTTP."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from longspec.api import LongSpec
from longspec.errors import UserError, shown
from longspec.server.app import make_app
from longspec.server.host import Host
from longspec.server.link import Link
from longspec.server.service import Limits, Service
from longspec.server.wire import Facts, receive

_CURL = """\
  curl {address}/v1/chat/completions -H "Content-Type: application/json"{key} \\
    -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'"""
# Connections that may wait to be accepted.
_BACKLOG = 2048
# The most bytes of a request's head, with the part of the body that comes with it.
_MOST_HEAD = 1_000_000
# Seconds that a connection may be idle: longer than clients and proxies keep theirs, so that the server never
# closes a connection while a client sends a request.
_KEEP_ALIVE = 75
# Seconds after which the system ends a connection whose client reads nothing. Without it, a closed connection
# would wait for such a client as long as the client lives.
_UNREAD = 120
# Seconds for telling clients that their answers will not be finished.
_LAST_WORDS = 2


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that a used address is refused before a long load."""
    if not 0 <= port < 2**16:  # getaddrinfo would take the port modulo 2**16
        raise UserError(f"cannot listen at port {shown(port)}; it must lie between 0 and {2**16 - 1}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError, OverflowError) as error:
        reason = shown(str(error), quoted=False)
        raise UserError(f"cannot listen at {shown(host)} port {port}: {reason}") from error
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; connections inherit it
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREAD)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        raise UserError(
            f"cannot listen at {host} port {port}: {error.strerror}; take another --port"
        ) from error
    return made


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}"


def read_api_keys(path: str) -> list[str]:
    """The keys in a file, one a line; a line that begins with # is a comment."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read --api-key-file {shown(path)}: {reason}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UserError(f"--api-key-file {shown(path)} holds no key; write at least one line")
    return keys


@dataclass(frozen=True)
class FrontOptions:
    """The settings of the front."""

    limits: Limits = field(default_factory=Limits)
    api_keys: tuple[str, ...] = ()
    method: dict[str, Any] = field(default_factory=dict)
    """Options of the method, for requests that name none."""
    grace_seconds: int = 30
    """At shutdown, the time for running answers to finish."""
    host: str = ""
    """The value of `--host`: the name or address at which the server listens."""
    names: tuple[str, ...] = ()
    """The names that requests may give the model, if not the target's."""


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a request with a long head, or with much after its body; uvicorn would keep all of it."""

    _size = 0
    """Bytes since the request began, or since the last of its body."""
    _is_in_head = _has_body = False

    def data_received(self, data: bytes) -> None:
        self._has_body = False
        super().data_received(data)
        self._size = 0 if self._has_body else self._size + len(data)
        if self._size <= _MOST_HEAD or self.transport.is_closing():
            return
        if self._is_in_head:
            self.send_400_response(f"The head of a request may have {_MOST_HEAD} bytes.")
        else:
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._size, self._is_in_head = 0, True

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # the others come after the body, and nobody reads them
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        super().on_body(body)


class FrontServer(uvicorn.Server):
    """Listens, calls `on_ready`, and ends at a signal or when the engine's process is gone."""

    def __init__(
        self, service: Service, listener: socket.socket, options: FrontOptions, on_ready: Callable[[], None]
    ) -> None:
        self._link, self._grace_seconds, self._on_ready = service.link, options.grace_seconds, on_ready
        is_local = ip_address(listener.getsockname()[0]).is_loopback and not options.api_keys
        super().__init__(
            uvicorn.Config(
                make_app(service, options.api_keys, self.end, options.host if is_local else None),
                http=BoundedProtocol,
                log_level="error",  # malformed requests are not logged
                access_log=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=options.grace_seconds + _LAST_WORDS,
                server_header=False,
                lifespan="on",
            )
        )

    def end(self) -> None:
        """Accept no more requests, and end when the running ones are answered."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._grace_seconds, self._link.end_all)
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def run_front(link: socket.socket, listener: socket.socket, options: FrontOptions) -> None:
    """The process that talks HTTP. It waits for the facts of the model, which come when it is loaded."""
    # Ctrl-C reaches both processes; until this one listens, the other one handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    facts = receive(link)
    if facts is None:
        return  # the model could not be loaded
    # A thread that tokenises a prompt waits several times for the event loop's thread, by default 5 ms each.
    sys.setswitchinterval(0.0005)
    service = Service(facts, Link(link), options.method, options.limits, options.names)
    told = _told(facts, address_of(listener), bool(options.api_keys))
    FrontServer(service, listener, options, lambda: print(told, flush=True)).run([listener])


def serve(load: Callable[[], LongSpec], listener: socket.socket, options: FrontOptions) -> None:
    """Load a model and serve it until a signal comes."""
    ours, theirs = socket.socketpair()
    front = get_context("spawn").Process(
        target=run_front, args=(theirs, listener, options), name="longspec-front", daemon=True
    )
    front.start()
    theirs.close()
    listener.close()
    with ours:
        model = load()

        def end(*_: object) -> None:
            if front.is_alive():
                front.terminate()

        before = {one: signal.signal(one, end) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            Host(model, ours).serve()
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
    front.join()
    # The front ends with 0, or by the signal that `end` sent.
    if front.exitcode not in (0, -signal.SIGTERM):
        raise ChildProcessError(f"the process that talks HTTP ended by itself, with code {front.exitcode}")


def _told(facts: Facts, address: str, has_key: bool) -> str:
    """The text that a user sees when the server is ready."""
    draft = f" with the draft {facts.draft_name}" if facts.draft_name else ""
    key = ' -H "Authorization: Bearer $KEY"' if has_key else ""
    return (
        f"{facts.name}{draft} on {facts.device}, context {facts.maker.max_length} tokens, "
        f"{facts.max_rows} answers at once\n"
        f"{address}     the page; OpenAI clients take {address}/v1\n{_CURL.format(address=address, key=key)}"
    )
