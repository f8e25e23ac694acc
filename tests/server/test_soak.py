"""Many clients at once, some of them rude, for as long as LONGSPEC_SOAK_SECONDS says (a minute)."""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

from longspec import LongSpec
from tests.server.live import Live, live

NUM_CLIENTS = 16
SECONDS = float(os.environ.get("LONGSPEC_SOAK_SECONDS", "60"))
DOCUMENT = "The mill by the river was built in 1820 and ground corn for two villages. " * 6
SCHEMA = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}
LOOKS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1, "seed": 2, "top_p": 0.9, "method": "lookup"},
    {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "method": "vanilla"},
    {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    {
        "temperature": 1,
        "seed": 4,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    },
    {"temperature": 0.9, "seed": 5, "n": 2},
]
QUESTIONS = ["When was it built?", "Who used it?", "Write a line about it."]
BODIES = [
    {"messages": [{"role": "user", "content": f"{DOCUMENT}\n{question}"}], "max_tokens": 16, **look}
    for question in QUESTIONS
    for look in LOOKS
]
PATH = "/v1/chat/completions"


class Crowd:
    """What clients do, and what came of it."""

    def __init__(self, server: Live) -> None:
        self.server, self.counts = server, Counter[str]()
        self.faults: list[str] = []
        self.expected = [
            self._whole(httpx.Client(base_url=server.address, timeout=600), body) for body in BODIES
        ]
        self.over = threading.Event()

    def _whole(self, client: httpx.Client, body: dict[str, Any]) -> list[str]:
        answer = client.post(PATH, json=body)
        assert answer.status_code == 200, answer.text
        return [choice["message"]["content"] for choice in answer.json()["choices"]]

    def _streamed(self, client: httpx.Client, body: dict[str, Any], pause: float = 0.0) -> list[str]:
        texts = [""] * body.get("n", 1)
        with client.stream("POST", PATH, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                time.sleep(pause)
                if line.startswith("data: {"):
                    told = json.loads(line.removeprefix("data: "))
                    assert "error" not in told, told
                    for choice in told["choices"]:
                        texts[choice["index"]] += choice["delta"].get("content", "")
            assert line == "" or line == "data: [DONE]"
        return texts

    def _leave(self, client: httpx.Client, body: dict[str, Any], chance: random.Random) -> None:
        with client.stream("POST", PATH, json=body | {"stream": True, "max_tokens": 400}) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number >= chance.randrange(12):
                    return

    def _kill(self, body: dict[str, Any], chance: random.Random) -> None:
        """Reset the connection, in the middle of the body or of the answer."""
        host, port = self.server.address.removeprefix("http://").split(":")
        text = json.dumps(body | {"max_tokens": 400, "stream": chance.random() < 0.5}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(text)}"
        with socket.create_connection((host, int(port)), timeout=60) as link:
            link.sendall(head.encode() + b"\r\n\r\n" + text[: chance.choice((10, len(text)))])
            time.sleep(chance.random())
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _refused(self, client: httpx.Client, chance: random.Random) -> None:
        body = chance.choice((b"{", b"[]", b'{"messages": 5}', chance.randbytes(50), b'{"prompt": "x"}'))
        answer = client.post(PATH, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text

    def visit(self, seed: int) -> None:
        """One client."""
        chance = random.Random(seed)
        client = httpx.Client(base_url=self.server.address, timeout=600)
        while not self.over.is_set():
            number, kind = chance.randrange(len(BODIES)), chance.random()
            body, expected = BODIES[number], self.expected[number]
            try:
                if kind < 0.3:
                    self._check(self._whole(client, body), expected)
                elif kind < 0.6:
                    self._check(self._streamed(client, body), expected)
                elif kind < 0.7:
                    self._check(self._streamed(client, body, pause=0.05), expected)
                elif kind < 0.8:
                    self._leave(client, body, chance)
                elif kind < 0.9:
                    self._kill(body, chance)
                else:
                    self._refused(client, chance)
            except Exception as error:
                self.faults.append(f"{type(error).__name__}: {error}")
                return
            self.counts["answered" if kind < 0.7 else "rude"] += 1
        client.close()

    def _check(self, said: list[str], expected: list[str]) -> None:
        assert said == expected


def memory() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.full
def test_many_clients_some_of_them_rude() -> None:
    # Few pages, all of them touched before memory is measured: the KV of finished texts fills what there is.
    model = LongSpec.from_pretrained(dtype="float32", device="cpu", calibrate=False, kv_memory=256_000_000)
    with model.engine.paused() as device:
        for part in (device.models.pages.keys, device.models.pages.values):
            part.zero_()
    with live(model, method="seq", gamma=3) as server:
        crowd = Crowd(server)
        threads = [threading.Thread(target=crowd.visit, args=(seed,)) for seed in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        sizes = []
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and not crowd.faults:
            time.sleep(min(5, SECONDS / 10))
            sizes.append(memory())
        crowd.over.set()
        for thread in threads:
            thread.join()
        assert not crowd.faults
        for _ in range(500):
            if server.is_idle:
                break
            time.sleep(0.01)
        assert server.is_idle
        assert httpx.get(f"{server.address}/health").status_code == 200
        print(dict(crowd.counts), [size >> 20 for size in sizes])
        assert crowd.counts["answered"] >= NUM_CLIENTS
        # Flat: the second half takes no more than the first did, but for what allocators keep.
        half = len(sizes) // 2
        assert max(sizes[half:]) - max(sizes[:half]) < 64 << 20
