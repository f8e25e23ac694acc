"""Measure a server with OpenAI's interface: throughput and latencies at several numbers of clients.

python benchmarks/serve_load.py --url http://127.0.0.1:8000 --concurrency 1,8,32,128 --json ours.json

Every client sends its next request when it has its answer. The same prompts go to every server in the same
order, so that two servers can be compared; with --ignore-eos all answers have the same length. It needs only
httpx, so that it can run beside any server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import httpx

PROMPTS = (
    "Give three tips for staying healthy.",
    "Write a Python function that tells whether a word is a palindrome, and explain it.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Show your steps.",
    "Why does the moon have phases? Explain it to a child.",
    (
        "Summarise this in two sentences: the council met on Monday to decide about the old bridge. Two "
        "engineers reported that its pillars are sound but that the road on it is not, and asked for repairs "
        "before winter. The shopkeepers fear for their trade while it is closed. It was agreed to close one "
        "side at a time."
    ),
    "Translate into French: the library is closed on Sundays, but you can return books at the door.",
    "Write a short letter to a landlord about a broken heater.",
    "What are the differences between a list and a tuple in Python?",
)
TEXT_EVENT = re.compile(rb'"content": ?"[^"]')
"""What an event that brings text looks like."""


@dataclass(frozen=True)
class Setting:
    """What is sent, and where."""

    url: str
    key: str | None
    model: str | None
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    stream: bool


@dataclass(frozen=True)
class Done:
    """One request. Times are seconds of a clock that all processes share."""

    begun: float
    first: float
    ended: float
    gaps: list[float]
    """From one piece of a stream to the next; a piece may hold several tokens."""
    tokens: int
    error: str | None = None


async def ask(client: httpx.AsyncClient, setting: Setting, number: int, prompt: str) -> Done:
    """Send one request and see it through."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": setting.max_tokens,
        "temperature": setting.temperature,
        "seed": setting.seed + number,
        "stream": setting.stream,
        "ignore_eos": setting.ignore_eos,
    }
    if setting.model:
        body["model"] = setting.model
    if setting.stream:
        body["stream_options"] = {"include_usage": True}
    begun, last = time.monotonic(), b""
    times: list[float] = []
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:200]!r}")
            async for part in answer.aiter_raw():
                # The first event of a stream names the role; what follows may come with it.
                if not setting.stream or times or TEXT_EVENT.search(part):
                    times.append(time.monotonic())
                last = (last + part)[-8192:] if setting.stream else last + part
    except (httpx.HTTPError, RuntimeError) as error:
        now = time.monotonic()
        return Done(begun, now, now, [], 0, f"{type(error).__name__}: {error}")
    ended = time.monotonic()
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return Done(begun, times[0] if times else ended, ended, gaps, count_tokens(last, setting.stream))


def count_tokens(body: bytes, stream: bool) -> int:
    """The tokens of an answer, as its usage tells."""
    if not stream:
        return int(json.loads(body)["usage"]["completion_tokens"])
    for event in reversed(body.split(b"\n\n")):
        if event.startswith(b"data: {") and b'"completion_tokens"' in event:
            return int(json.loads(event[6:])["usage"]["completion_tokens"])
    raise RuntimeError("the stream ended without its usage")


async def run_clients(setting: Setting, work: Sequence[tuple[int, str]], num_clients: int) -> list[Done]:
    """So many clients at once, each taking the next prompt when it is free."""
    done: list[Done] = []
    coming = iter(work)
    headers = {"Authorization": f"Bearer {setting.key}"} if setting.key else {}
    limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=num_clients)
    async with httpx.AsyncClient(
        base_url=setting.url, headers=headers, limits=limits, timeout=httpx.Timeout(600)
    ) as client:

        async def one() -> None:
            for number, prompt in coming:
                done.append(await ask(client, setting, number, prompt))

        await asyncio.gather(*(one() for _ in range(num_clients)))
    return done


def in_process(setting: Setting, work: list[tuple[int, str]], num_clients: int) -> list[Done]:
    """The clients of one process."""
    return asyncio.run(run_clients(setting, work, num_clients))


def measure(setting: Setting, prompts: list[str], num_clients: int, num_processes: int) -> dict[str, Any]:
    """All prompts once, by so many clients, spread over processes."""
    num_processes = min(num_processes, num_clients)
    shares = [list(enumerate(prompts))[part::num_processes] for part in range(num_processes)]
    clients = [len(range(part, num_clients, num_processes)) for part in range(num_processes)]
    if num_processes == 1:
        found = in_process(setting, shares[0], num_clients)
    else:
        with ProcessPoolExecutor(num_processes) as pool:
            parts = pool.map(in_process, [setting] * num_processes, shares, clients)
            found = [one for part in parts for one in part]
    good = [one for one in found if one.error is None]
    seconds = max(one.ended for one in found) - min(one.begun for one in found)
    tokens = sum(one.tokens for one in good)
    per_token = [(one.ended - one.first) / (one.tokens - 1) for one in good if one.tokens > 1]
    return {
        "concurrency": num_clients,
        "requests": len(found),
        "errors": len(found) - len(good),
        "first_error": next((one.error for one in found if one.error), None),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(good) / seconds,
        "first_token": percentiles([one.first - one.begun for one in good]),
        "per_token": percentiles(per_token),
        "between_pieces": percentiles([gap for one in good for gap in one.gaps]),
        "whole": percentiles([one.ended - one.begun for one in good]),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90 and p99 by the nearest rank."""
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in shares.items() if ordered}


def read_prompts(path: Path | None) -> Iterator[str]:
    """The prompts of a JSONL file, or of this one. Beyond the last they repeat, each time with another number
    in front, so that no prompt is sent twice."""
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    texts = [json.loads(line)["prompt"] for line in lines] if path else list(PROMPTS)
    if not texts:
        sys.exit(f"{path} holds no prompts")
    yield from texts
    for number in count(1):
        yield f"({number}) {texts[number % len(texts)]}"


def table(lines: list[dict[str, Any]]) -> str:
    """For people; times in milliseconds."""

    def ms(line: dict[str, Any], name: str, rank: str) -> str:
        value = line[name].get(rank)
        return "-" if value is None else f"{1000 * value:.1f}"

    rows = ["clients  tokens/s  req/s  first p50  first p99  per token p50  p99  whole p50  p99  errors"]
    for line in lines:
        cells = [
            ms(line, name, rank) for name in ("first_token", "per_token", "whole") for rank in ("p50", "p99")
        ]
        speed = f"{line['tokens_per_second']:9.1f} {line['requests_per_second']:6.2f}"
        rows.append(f"{line['concurrency']:7d} {speed}  {'  '.join(cells)}  {line['errors']}")
    return "\n".join(rows)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", help="API key")
    parser.add_argument("--model", help="its name, where the server wants one")
    parser.add_argument("--concurrency", default="1,8,32,128", help="numbers of clients (%(default)s)")
    parser.add_argument("--requests", type=int, default=0, help="at each (4 for each client, at least 16)")
    parser.add_argument("--prompts", type=Path, help="JSONL with a 'prompt' each (eight that are built in)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ignore-eos", action="store_true", help="all answers have --max-tokens tokens")
    parser.add_argument("--no-stream", dest="stream", action="store_false", help="whole answers")
    parser.add_argument("--processes", type=int, default=4, help="of clients (%(default)s)")
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false", help="count from the first on")
    parser.add_argument("--json", type=Path, help="write all figures there")
    given = parser.parse_args()
    setting = Setting(
        given.url, given.key, given.model, given.max_tokens, given.temperature, given.seed, given.ignore_eos,
        given.stream,
    )  # fmt: skip
    lines, prompts = [], read_prompts(given.prompts)
    for num_clients in map(int, given.concurrency.split(",")):
        if given.warm_up:
            measure(setting, list(islice(prompts, 2 * num_clients)), num_clients, given.processes)
        wanted = given.requests or max(16, 4 * num_clients)
        lines.append(measure(setting, list(islice(prompts, wanted)), num_clients, given.processes))
        print(table(lines[-1:]), flush=True)
    if given.json:
        given.json.write_text(
            json.dumps({"setting": asdict(setting) | {"key": None}, "levels": lines}, indent=2)
        )
    return int(any(line["errors"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
