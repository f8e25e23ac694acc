"""Malformed requests: each is the client's fault, and the server lives on."""

from __future__ import annotations

import json
import logging
import random
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from longspec import LongSpec
from longspec.server.schema import ChatRequest, CompletionRequest
from longspec.server.service import Limits
from tests.server.live import Live, live

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
}
FIELDS = {
    "/v1/chat/completions": [*ChatRequest.model_fields, *ChatRequest.neutral, "audio", "functions"],
    "/v1/completions": [*CompletionRequest.model_fields, *CompletionRequest.neutral, "suffix", "messages"],
}
for names in FIELDS.values():
    names.remove("max_seconds")  # a busy machine may take longer, and says so with status 504
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e308, 2**31, 2**63, 2**64, 10**400),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "auto", "\x00", "\udc00", "ｘ" * 300),
    *([], [[]], [None], [1, "a"], [-1], [10**9], {}, {"": {}}, {"type": "text"}, {"type": "json_schema"}),
    {"type": "json_object", "json_schema": {}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(" * 50}}},
    {"include_usage": "yes"},
    [{"role": "user"}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "system", "content": "a" * 9000}],
    [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
]


def junk(chance: random.Random, depth: int = 0) -> Any:
    if depth < 3 and chance.random() < 0.3:
        parts = [junk(chance, depth + 1) for _ in range(chance.randrange(3))]
        return (
            parts if chance.random() < 0.5 else {chance.choice(["type", "role", "x"]): part for part in parts}
        )
    return chance.choice(JUNK)


def mutated(chance: random.Random, path: str) -> bytes:
    """A valid body in which something is wrong: of a field's type, its value, or its neighbours."""
    body = json.loads(json.dumps(VALID[path]))
    for _ in range(chance.randint(1, 3)):
        field = chance.choice(FIELDS[path])
        if chance.random() < 0.15:
            body.pop(field, None)
        else:
            body[field] = junk(chance)
    if chance.random() < 0.05:
        body = junk(chance)
    return json.dumps(body).encode()


def broken(chance: random.Random, path: str) -> bytes:
    """Bytes that are not even JSON."""
    whole = json.dumps(VALID[path]).encode()
    kind = chance.randrange(5)
    if kind == 0:
        return whole[: chance.randrange(len(whole))]
    if kind == 1:
        return chance.randbytes(chance.randrange(200))
    if kind == 2:
        return (b"[" if chance.random() < 0.5 else b'{"messages":') * chance.choice((10, 1000, 100_000))
    if kind == 3:
        place = chance.randrange(len(whole))
        return whole[:place] + chance.randbytes(3) + whole[place + 1 :]
    return whole + whole


def send_raw(server: Live, chance: random.Random) -> bytes:
    """What comes back for bytes that are hardly HTTP."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw = bytearray(head + b"Content-Length: 9\r\n\r\n")
    for _ in range(chance.randint(1, 6)):
        raw[chance.randrange(len(raw))] = chance.randrange(256)
    if chance.random() < 0.3:
        raw = bytearray(chance.randbytes(chance.randrange(1, 400)))
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as link:
        link.sendall(bytes(raw) + b"not json!\r\n\r\n")
        link.shutdown(socket.SHUT_WR)
        try:
            return link.recv(1000)
        except (ConnectionError, TimeoutError):
            return b""


def attack(server: Live, count: int, seed: int) -> Counter[int]:
    """Send so many requests that are refused; returns how often each status came."""
    chance, seen = random.Random(seed), Counter[int]()
    with httpx.Client(base_url=server.address, timeout=60) as client:
        while sum(number for status, number in seen.items() if status >= 400) < count:
            path, kind = chance.choice(list(VALID)), chance.random()
            if kind < 0.05:
                told = send_raw(server, chance)
                assert not told.startswith(b"HTTP/1.1 5"), told
                continue
            make = mutated if kind < 0.7 else broken
            body = make(chance, path)
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
            status = answer.status_code
            assert status == 200 or 400 <= status < 500, (status, body[:500], answer.text[:500])
            if make is broken and status == 200:
                json.loads(body)  # by chance it was not broken
            if status >= 400:
                assert answer.json()["error"]["message"]
            seen[status] += 1
    return seen


def _survives(tiny_folder: Path, caplog: pytest.LogCaptureFixture, count: int) -> None:
    model = LongSpec.from_pretrained(
        str(tiny_folder), dtype="float32", device="cpu", calibrate=False, max_length=512
    )
    with live(model, Limits(max_body=200_000)) as server, caplog.at_level(logging.ERROR):
        asked: Any = {"prompt": "Once upon", "max_tokens": 8, "temperature": 1, "seed": 1}
        url = f"{server.address}/v1/completions"
        before = httpx.post(url, json=asked).json()["choices"]
        seen = attack(server, count, seed=count)
        assert seen[400] > 0.8 * count
        assert httpx.post(url, json=asked).json()["choices"] == before
        assert httpx.get(f"{server.address}/health").status_code == 200
        assert server.is_idle
    assert not caplog.records


def test_malformed_requests_are_refused(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    _survives(tiny_folder, caplog, 300)


@pytest.mark.full
def test_5000_malformed_requests_are_refused(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    _survives(tiny_folder, caplog, 5000)
