"""Measure the server's front process: what HTTP, templates, tokens and events cost, without a GPU.

python -m benchmarks.serve_front --clients 128 --round-ms 3

The engine is a stand-in that emits known tokens at a GPU's pace; everything else is the server's own. Two
runs, one of them with answers of a single token, tell the cost of a request from that of a piece (what one
round brings one client).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import uvloop

from benchmarks.serve_load import TEXT_EVENT, percentiles, read_prompts
from longspec import hub
from longspec.api import SequenceMaker
from longspec.decoding.methods import Tree
from longspec.decoding.sampling import Sampling
from longspec.engine.engine import Statistics
from longspec.engine.sequence import Sequence
from longspec.prompts import PromptEncoder
from longspec.server.host import Host
from longspec.server.run import FrontOptions, address_of, bind, run_front

TEXT = (
    "The bridge was built in 1820, and for two hundred years nobody asked who had paid for it. "
    "`def is_palindrome(word): return word == word[::-1]` is short; “naïve” is longer. "
)

PATH = "/v1/chat/completions"


class PacedEngine:
    """Takes sequences as the engine does; a round takes so many seconds and emits tokens that are known."""

    def __init__(self, tokens: list[int], max_rows: int, round_seconds: float, per_round: float) -> None:
        self.scheduler = SimpleNamespace(max_rows=max_rows, seats={}, waiting=[])
        self.num_pieces = 0
        self._tokens, self._round_seconds, self._per_round = tokens, round_seconds, per_round
        self._method = Tree()
        self._chance = random.Random(0)
        self._orders: SimpleQueue[tuple[str, Sequence]] = SimpleQueue()

    @property
    def statistics(self) -> Statistics:
        """Nothing that anyone looks at here."""
        return Statistics(0, 0, 0, 0, {}, 1, 0)

    def submit(self, sequences: Any) -> None:
        """See `Engine`."""
        for sequence in sequences:
            sequence.submitted_at = time.perf_counter()
            self._orders.put(("add", sequence))

    def cancel(self, sequence: Sequence, waits: bool = True) -> None:
        """See `Engine`."""
        self._orders.put(("cancel", sequence))

    @contextmanager
    def serving(self, after_turn: Callable[[], object]) -> Iterator[None]:
        """See `Engine`."""
        over = threading.Event()

        def lead() -> None:
            due = time.perf_counter()
            while not over.is_set():
                self._round()
                after_turn()
                due = max(due + self._round_seconds, time.perf_counter())
                time.sleep(max(0.0, due - time.perf_counter()))

        thread = threading.Thread(target=lead)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _round(self) -> None:
        running, waiting = self.scheduler.seats, self.scheduler.waiting
        while not self._orders.empty():
            what, sequence = self._orders.get()
            if what == "add":
                waiting.append(sequence)
            elif not sequence.finished:
                sequence.finish("closed")
        for sequence in [one for one in running if not one.finished]:
            count = int(self._per_round + self._chance.random())
            start = len(sequence.tokens) % (len(self._tokens) - count)
            sequence.keep_round(self._tokens[start : start + count], self._method)
            self.num_pieces += 1
        self.scheduler.seats = running = {one: None for one in running if not one.finished}
        while waiting and len(running) < self.scheduler.max_rows:
            sequence = waiting.pop(0)
            if not sequence.finished:
                running[sequence] = None
                sequence.keep_first(self._tokens[0])
                self.num_pieces += 1


def default_maker() -> SequenceMaker:
    """Of the default target, whose weights are not read."""
    files = hub.resolve(hub.DEFAULT_TARGET)
    assert files.entry is not None
    encoder = PromptEncoder(files.folder, files.entry.chat_template)
    return SequenceMaker(encoder, Sampling(), frozenset(), len(encoder.tokenizer), 8192)


@contextmanager
def paced_server(engine: PacedEngine, maker: SequenceMaker) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a front before a stand-in engine, and its process."""
    ours, theirs = socket.socketpair()
    listener = bind("127.0.0.1", 0)
    address = address_of(listener)
    front = get_context("spawn").Process(target=run_front, args=(theirs, listener, FrontOptions()))
    front.start()
    theirs.close()
    listener.close()
    target = SimpleNamespace(device="cpu", dtype="torch.float32")
    model: Any = SimpleNamespace(
        name="paced", draft_name=None, target=target, engine=engine, maker=maker,
        tokenizer=maker.encoder.tokenizer,
    )  # fmt: skip
    host = threading.Thread(target=Host(model, ours).serve)
    host.start()
    transport = httpx.HTTPTransport(retries=10)
    httpx.Client(transport=transport, timeout=60).get(f"{address}/health").raise_for_status()
    try:
        yield address, psutil.Process(front.pid)
    finally:
        front.terminate()
        front.join()
        host.join()
        ours.close()


class Client(asyncio.Protocol):
    """Sends requests one after the other and notes when the first token and the end came. It looks at as
    little as it can: with 128 of a full HTTP client the clients would be the limit."""

    def __init__(self, address: tuple[str, int], work: Iterator[bytes]) -> None:
        self._work, self._head = work, f"POST {PATH} HTTP/1.1\r\nHost: {address[0]}\r\n"
        self.times: list[tuple[float, float, float]] = []
        """When a request was sent, its first token was there, and its end."""
        self.is_done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self._transport = transport
        self._send_next()

    def _send_next(self) -> None:
        body = next(self._work, None)
        if body is None:
            self._transport.close()
            self.is_done.set_result(None)
            return
        self._begun, self._first, self._tail = time.perf_counter(), 0.0, b""
        head = f"{self._head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        """Part of an answer."""
        now = time.perf_counter()
        if not self._first and TEXT_EVENT.search(data):
            self._first = now
        self._tail = (self._tail + data)[-32:]
        if self._tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            self.times.append((self._begun, self._first or now, now))
            self._send_next()

    def connection_lost(self, error: Exception | None) -> None:
        """Only after the last answer."""
        if not self.is_done.done():
            self.is_done.set_exception(error or ConnectionError(f"the answer broke off: {self._tail!r}"))


async def run_clients(
    address: str, bodies: list[bytes], num_clients: int
) -> list[tuple[float, float, float]]:
    """So many clients at once, each taking the next request when it is free."""
    host, port = address.removeprefix("http://").split(":")
    loop, work = asyncio.get_running_loop(), iter(bodies)
    made = [
        loop.create_connection(lambda: Client((host, int(port)), work), host, int(port))
        for _ in range(num_clients)
    ]
    clients = [client for _, client in await asyncio.gather(*made)]
    await asyncio.gather(*(client.is_done for client in clients))
    return [one for client in clients for one in client.times]


def in_process(address: str, bodies: list[bytes], num_clients: int) -> list[tuple[float, float, float]]:
    """The clients, in a process of their own."""
    return uvloop.run(run_clients(address, bodies, num_clients))


def cpu_seconds(process: psutil.Process) -> float:
    """Of its threads and of the process that renders templates, user's and system's."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--rows", type=int, default=128, help="answers at once (%(default)s)")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=150)
    parser.add_argument("--round-ms", type=float, default=3.0)
    parser.add_argument("--per-round", type=float, default=3.5, help="tokens that a round emits for a row")
    given = parser.parse_args()
    maker = default_maker()
    tokens = maker.encoder.tokenizer(TEXT * 20)["input_ids"]
    engine = PacedEngine(tokens, given.rows, given.round_ms / 1000, given.per_round)
    prompts, costs = read_prompts(None), []
    with paced_server(engine, maker) as (address, front), ProcessPoolExecutor(1) as pool:

        def run(num_requests: int, max_tokens: int) -> list[tuple[float, float, float]]:
            bodies = [
                json.dumps(
                    {
                        "messages": [{"role": "user", "content": prompt}],
                        "max_tokens": max_tokens,
                        "stream": True,
                        "stream_options": {"include_usage": True},
                        "ignore_eos": True,
                    }
                ).encode()
                for prompt in islice(prompts, num_requests)
            ]
            return pool.submit(in_process, address, bodies, given.clients).result()

        for max_tokens in (1, given.max_tokens):
            run(2 * given.clients, max_tokens)
            before, here, pieces = cpu_seconds(front), time.process_time(), engine.num_pieces
            times = run(given.requests, max_tokens)
            here, spent = time.process_time() - here, cpu_seconds(front) - before
            pieces = engine.num_pieces - pieces
            costs.append((spent / given.requests, pieces / given.requests))
            seconds = max(end for _, _, end in times) - min(begun for begun, _, _ in times)
            first, whole = (percentiles([one[i] - one[0] for one in times]) for i in (1, 2))
            told = {
                "max_tokens": max_tokens,
                "requests_per_second": given.requests / seconds,
                "pieces_per_second": pieces / seconds,
                "first_token_ms": {name: 1e3 * value for name, value in first.items()},
                "whole_ms": {name: 1e3 * value for name, value in whole.items()},
                "front_cpu": spent / seconds,
                "engine_side_cpu": here / seconds,
            }
            print(json.dumps(told), flush=True)
    (one, first_pieces), (many, all_pieces) = costs
    per_piece = (many - one) / (all_pieces - first_pieces)
    told = {"ms_per_request": 1e3 * (one - per_piece * first_pieces), "us_per_piece": 1e6 * per_piece}
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
