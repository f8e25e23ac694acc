"""The engine under load: requests that arrive by a Poisson process, and how long each of them waits."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from longspec.api import LongSpec
from longspec.bench.environment import command_line, environment
from longspec.bench.run import WARM_UP
from longspec.bench.settings import LoadSetting
from longspec.bench.workloads import Workload
from longspec.decoding.methods.registry import read_label
from longspec.engine.sequence import Sequence as Request
from longspec.progress import Advance, count_bar

# The requests that are left have starved when no request got a token for this many seconds.
STARVED_SECONDS = 120.0


@dataclass(frozen=True)
class Percentiles:
    """Seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        return cls(*(float(one) for one in np.percentile(values, (50, 90, 99)))) if values else None


@dataclass(frozen=True)
class LoadLine:
    """The result of one rate."""

    rate: float | None
    """Requests per second; None: all were submitted at once."""
    share: float | None
    requests: int
    starved: int
    """Requests that never finished."""
    seconds: float
    """From the first arrival to the last token."""
    tokens: int
    tokens_per_second: float
    requests_per_second: float
    prompt_tokens: int
    shared_tokens: int
    """Prompt tokens whose KV was shared with an earlier prompt."""
    tau: float
    first_token: Percentiles | None
    """From a request's arrival to its first token."""
    between_tokens: Percentiles | None
    """From one arrival of tokens to the next; a round may bring several tokens."""
    whole: Percentiles | None
    """From a request's arrival to its end."""
    longest_wait: float
    """The longest time in which a request got no token."""
    num_paused: int
    """How often a request gave its pages to an older one and was computed again later."""
    num_captures: int
    """Rounds that were captured meanwhile, while requests waited."""


@dataclass(frozen=True)
class LoadRun:
    """A whole run."""

    command: str
    setting: LoadSetting
    workload: str
    num_prompts: int
    """Different prompts; further requests repeat them in order."""
    environment: dict[str, Any]
    lines: list[LoadLine]


def measure_load(
    model: LongSpec, workload: Workload, setting: LoadSetting, progress: bool = False
) -> LoadRun:
    """All rates in order; with shares, everything at once before them."""
    prompts = [item.prompt(model, []) for item in workload.items]
    asked = [prompts[number % len(prompts)] for number in range(setting.requests)]
    num_prompts = min(len(prompts), setting.requests)
    run = LoadRun(command_line(), setting, workload.name, num_prompts, environment(model), [])
    _warm_up(model, asked, setting, progress)
    rates: list[tuple[float, float | None]] = [(rate, None) for rate in setting.rates or ()]
    if setting.shares:
        with count_bar("all at once", setting.requests, progress) as advance:
            whole = _send(model, asked, setting, None, None, advance)
        run.lines.append(whole)
        rates = [(share * whole.requests_per_second, share) for share in setting.shares]
    for rate, share in rates:
        with count_bar(f"{rate:.3g} a second", setting.requests, progress) as advance:
            run.lines.append(_send(model, asked, setting, rate, share, advance))
    return run


def _warm_up(model: LongSpec, asked: Sequence[list[int]], setting: LoadSetting, progress: bool) -> None:
    """Run every number of rows once where a round is captured for each, so that no request waits for it."""
    device, most = model.engine.device, min(len(asked), model.engine.device.max_rows)
    sizes = [*(size for size in device.buckets if size < most and device.models.fused), len(asked)]
    model.engine.prepare(most)
    short = replace(setting, max_new_tokens=min(WARM_UP, setting.max_new_tokens))
    with count_bar("warming up", sum(sizes), progress) as advance:
        for size in sizes:
            _send(model, asked[:size], short, None, None, advance)


class _Watch:
    """When tokens came to one request."""

    def __init__(self, request: Request, due: float) -> None:
        self.request, self.due = request, due
        self.times: list[float] = []
        self._seen = 0

    def note(self) -> None:
        if len(self.request.tokens) > self._seen:
            self._seen = len(self.request.tokens)
            self.times.append(time.perf_counter())

    @property
    def waits(self) -> list[float]:
        """Seconds from each arrival of tokens to the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]


def arrivals(requests: int, rate: float | None, seed: int) -> list[float]:
    """Seconds from the first arrival on, by a Poisson process; all 0 without a rate.

    A seed gives the same arrivals at every rate but for their scale.
    """
    chance = random.Random(seed)
    gaps = [chance.expovariate(1.0) / rate if rate else 0.0 for _ in range(requests - 1)]
    return list(accumulate(gaps, initial=0.0))


def _send(
    model: LongSpec,
    asked: Sequence[list[int]],
    setting: LoadSetting,
    rate: float | None,
    share: float | None,
    advance: Advance,
) -> LoadLine:
    engine, inbox = model.engine, SimpleQueue[Request]()
    sampling = replace(model.defaults, temperature=setting.temperature)
    method = read_label(setting.method)
    engine.forget()
    before, started = engine.statistics, time.perf_counter()
    watches = []
    for number, due in enumerate(arrivals(len(asked), rate, setting.seed)):
        seed, most = setting.seed + number, setting.max_new_tokens
        request = Request(asked[number], most, sampling, seed, model.eos_ids, method, on_news=inbox.put)
        watches.append(_Watch(request, started + due))
    try:
        with engine.serving():
            _wait_for_all(model, watches, inbox, advance)
    finally:
        for watch in watches:
            engine.cancel(watch.request)
    after = engine.statistics
    counts = (after.num_paused - before.num_paused, after.num_captures - before.num_captures)
    return _line(watches, started, rate, share, counts)


def _wait_for_all(
    model: LongSpec, watches: Sequence[_Watch], inbox: SimpleQueue[Request], advance: Advance
) -> None:
    """Submit requests when they are due; return when all have finished or no token came for too long."""
    open_watches = {watch.request: watch for watch in watches}
    coming = list(reversed(watches))
    while open_watches:
        now = time.perf_counter()
        while coming and coming[-1].due <= now:
            model.engine.submit([coming.pop().request])
        waiting = coming[-1].due - now if coming else STARVED_SECONDS
        try:
            request = inbox.get(timeout=max(waiting, 0.0))
        except Empty:
            if not coming:
                return
            continue
        if request.error is not None:
            raise request.error
        if (watch := open_watches.get(request)) is None:
            continue  # the request had finished when an earlier piece of it was read
        watch.note()
        if request.finished:
            del open_watches[request]
            advance(1)


def _line(
    watches: Sequence[_Watch],
    started: float,
    rate: float | None,
    share: float | None,
    counts: tuple[int, int],
) -> LoadLine:
    requests = [watch.request for watch in watches]
    ended = [one for one in watches if one.request.finish_reason not in (None, "closed")]
    begun = [one for one in watches if one.times]
    tokens, rounds = (sum(len(one.tokens) for one in requests), sum(one.num_rounds for one in requests))
    seconds = max((watch.times[-1] for watch in begun), default=started) - started
    firsts = [one.request.first_at - one.due for one in begun]
    waits = [wait for one in begun for wait in one.waits]
    # Starved requests still wait.
    now = time.perf_counter()
    open_ends = [now - (one.times[-1] if one.times else one.due) for one in watches if one not in ended]
    return LoadLine(
        rate=rate,
        share=share,
        requests=len(requests),
        starved=len(requests) - len(ended),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        requests_per_second=len(ended) / seconds if seconds else 0.0,
        prompt_tokens=sum(len(one.prompt) for one in requests),
        shared_tokens=sum(one.num_shared for one in requests),
        tau=sum(len(one.tokens) - one.num_first for one in requests) / rounds if rounds else 0.0,
        first_token=Percentiles.of(firsts),
        between_tokens=Percentiles.of(waits),
        whole=Percentiles.of([one.request.finished_at - one.due for one in ended]),
        longest_wait=max([*firsts, *waits, *open_ends], default=0.0),
        num_paused=counts[0],
        num_captures=counts[1],
    )
