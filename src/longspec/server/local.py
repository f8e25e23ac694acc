"""Which hosts a server without an API key answers for, if only this machine can reach it."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from longspec.errors import shown
from longspec.server.errors import ApiError


class OnlyLocal:
    """Refuses requests whose Host header names another machine, because a web site can let its own name
    resolve to 127.0.0.1 and then read our answers from its page (DNS rebinding)."""

    def __init__(
        self, app: ASGIApp, host: str, tell_error: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        self._app, self._host, self._tell_error = app, host.lower(), tell_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if not given or self._is_here(given):  # a browser always says the host
            await self._app(scope, receive, send)
            return
        message = (
            f"this server has no API key and answers only requests for localhost, not for {shown(given)}; "
            "start it with --api-key-file, or with that name as --host"
        )
        answer = await self._tell_error(Request(scope), ApiError(421, message, "unknown_host"))
        await answer(scope, receive, send)

    def _is_here(self, given: str) -> bool:
        with contextlib.suppress(ValueError):
            name = urlsplit(f"//{given}").hostname or ""
            if name == self._host or name == "localhost" or name.endswith(".localhost"):
                return True
            return ip_address(name).is_loopback
        return False
