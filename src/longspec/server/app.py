"""The routes of the server: they check requests and write responses."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import resources
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from longspec import __version__
from longspec.server.answer import Answer
from longspec.server.errors import ApiError, refused
from longspec.server.local import OnlyLocal
from longspec.server.schema import Asked, ChatRequest, CompletionRequest
from longspec.server.service import Service

_LOG = logging.getLogger("longspec.server")
# The page may run only its own script and talk only to its own server.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
# Seconds for sending an error to a client that may not read.
_LAST_WORDS = 2.0


def make_app(
    service: Service, api_keys: Sequence[str], on_lost: Callable[[], None], only_host: str | None
) -> Starlette:
    """The whole server. Without keys, every client is answered. `on_lost` is called when the engine's process
    is gone. Unless `only_host` is None, requests must be for this machine, as a local name or as that one."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with service.running(on_lost):
            yield

    front = _Front(service, [key.encode() for key in api_keys])
    page = resources.files("longspec.server") / "page"
    routes = [
        Route("/v1/models", front.models, methods=["GET"]),
        Route("/v1/models/{name:path}", front.model, methods=["GET"]),
        Route("/v1/chat/completions", front.chat, methods=["POST"]),
        Route("/v1/completions", front.complete, methods=["POST"]),
        Route("/health", front.health, methods=["GET"]),
        Route("/metrics", front.metrics, methods=["GET"]),
        *(
            Route(path, _file((page / name).read_bytes(), kind), methods=["GET"])
            for path, (name, kind) in _PAGE.items()
        ),
    ]
    handlers: dict[Any, Any] = {
        ApiError: front.tell_error,
        HTTPException: front.tell_http_error,
        Exception: front.tell_fault,
    }
    guards = [] if only_host is None else [Middleware(OnlyLocal, only_host, front.tell_error)]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=guards)


def _file(content: bytes, kind: str) -> Any:
    async def give(_: Request) -> Response:
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    return give


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(body), status, headers, "application/json")


class _Front:
    """The routes' functions."""

    def __init__(self, service: Service, api_keys: list[bytes]) -> None:
        self._service, self._api_keys = service, api_keys

    async def models(self, request: Request) -> Response:
        self._authorise(request)
        return _json({"object": "list", "data": [*map(self._service.about_model, self._service.names)]})

    async def model(self, request: Request) -> Response:
        self._authorise(request)
        name = request.path_params["name"]
        self._service.check_model(name)
        return _json(self._service.about_model(name))

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest)

    async def health(self, _: Request) -> Response:
        """Whether requests are answered. After a failure of the engine: not until an answer succeeds."""
        is_well = not (self._service.is_failing or self._service.link.is_lost)
        return _json(
            {"status": "ok" if is_well else "failing", "version": __version__}, 200 if is_well else 503
        )

    async def metrics(self, _: Request) -> Response:
        link, metrics = self._service.link, self._service.metrics
        metrics.count(link.rows)
        told = metrics.told(await link.status())
        return Response(told, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tell_error(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self._service.metrics.note_refused(error.status)
        return _json(error.body(), error.status, error.headers)

    async def tell_http_error(self, request: Request, error: Exception) -> Response:
        """Answer a request for a path or a method that does not exist."""
        assert isinstance(error, HTTPException)
        known = error.status_code < 500
        message = f"there is no {request.method} {request.url.path[:100]}" if known else error.detail
        refusal = ApiError(error.status_code, message, "unknown_url", headers=error.headers)
        return await self.tell_error(request, refusal)

    async def tell_fault(self, request: Request, _: Exception) -> Response:
        """Answer a request that hit a bug; the log has the details."""
        return await self.tell_error(request, _fault())

    def _authorise(self, request: Request) -> None:
        if not self._api_keys:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        # Compare with all keys, each in constant time, so that the time says nothing about them.
        matches = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._api_keys]
        if kind.lower() != "bearer" or not any(matches):
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer KEY", "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    async def _answer(self, request: Request, schema: type[Asked]) -> Response:
        self._authorise(request)
        # Any web page may send other types without permission (CORS, "simple requests").
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be JSON: Content-Type: application/json", "unsupported_type")
        body = await self._read(request)
        try:
            asked = schema.model_validate_json(body)
        except ValidationError as error:
            raise refused(error) from error
        return _Answering(self._service, asked)

    async def _read(self, request: Request) -> bytes:
        limits, parts, size = self._service.limits, [], 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > limits.max_body:
                        raise ApiError(413, f"the body exceeds {limits.max_body} bytes", "body_too_large")
        except TimeoutError as error:
            raise ApiError(408, "the body did not come in time", "timeout") from error
        except ClientDisconnect as error:
            raise ApiError(400, "the client left", "disconnected") from error
        return b"".join(parts)


class _Answering(Response):
    """A response that is computed while it is sent, and stops as soon as the client is gone."""

    def __init__(self, service: Service, asked: Asked) -> None:
        super().__init__()
        self._service, self._asked = service, asked
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
        fault = results[0]
        if isinstance(fault, ApiError):
            await self._refuse(scope, receive, send, fault)
        elif isinstance(fault, Exception):
            _LOG.error("an answer failed", exc_info=fault)
            await self._refuse(scope, receive, send, _fault())

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
        """Send an error: as a status, or as an event if a stream has begun."""
        self._service.metrics.note_refused(error.status)
        if not self._is_started:
            await _json(error.body(), error.status, error.headers)(scope, receive, send)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                body = b"data: " + to_json(error.body()) + b"\n\ndata: [DONE]\n\n"
                await _send(send, body, last=True)

    async def _answer(self, send: Send) -> None:
        seconds = min(
            self._asked.max_seconds or self._service.limits.max_seconds, self._service.limits.max_seconds
        )
        try:
            async with asyncio.timeout(seconds), self._service.answering(self._asked) as answer:
                await (self._stream if self._asked.stream else self._send_whole)(answer, send)
        except TimeoutError as error:
            raise ApiError(504, f"the answer took longer than {seconds:g} s", "deadline_exceeded") from error

    async def _send_whole(self, answer: Answer, send: Send) -> None:
        while not answer.is_finished:
            await answer.news.wait()
            answer.news.clear()
        _check(answer)
        body = to_json(answer.whole())
        await self._start(send, "application/json", len(body))
        await _send(send, body, last=True)

    async def _stream(self, answer: Answer, send: Send) -> None:
        is_finished = False
        while not is_finished:
            await answer.news.wait()
            answer.news.clear()
            _check(answer)
            is_finished = answer.is_finished
            events = answer.events() + (answer.last_events() if is_finished else b"")
            if events and not self._is_started:
                await self._start(send, "text/event-stream; charset=utf-8")
            if events:
                await _send(send, events, last=is_finished)

    async def _start(self, send: Send, kind: str, size: int | None = None) -> None:
        headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-cache")]
        if size is not None:
            headers.append((b"content-length", str(size).encode()))
        self._is_started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})


def _fault() -> ApiError:
    return ApiError(500, "the server made a mistake", "internal_error")


def _check(answer: Answer) -> None:
    """Raise an error if the engine could not answer."""
    end = answer.error
    if end is not None and end.is_users_fault:
        raise ApiError(400, end.error or "", "invalid_value")
    if end is not None:
        raise ApiError(500, f"the engine failed: {end.error}", "engine_error")
    if any(choice.row.finish_reason == "closed" for choice in answer.choices):
        raise ApiError(503, "the server is shutting down", "shutting_down")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, body: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})
