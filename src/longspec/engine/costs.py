"""What a round costs on this machine: measured once for each method and number of rows, and remembered.

What is measured while other programs take the processors is used, but not believed: it is measured again the
next time, a few times at most, and the least disturbed figures count.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from longspec import __version__
from longspec.decoding.methods import VANILLA, Method
from longspec.engine.device import Device, Report
from longspec.hub import cache_dir
from longspec.models.files import write_whole
from longspec.models.placement import device_name
from longspec.progress import count_bar

Times = dict[str, dict[int, list[tuple[int, float]]]]
"""By a method's label and the number of rows: (context, seconds of a round)."""
# Contexts at which rounds are timed.
HOST_CONTEXTS, CAPTURED_CONTEXTS = (256, 2048), (512, 8192, 65536)
# Rounds that are timed, after one or more that are not: by the host so many at least, and at most.
HOST_ROUNDS, CAPTURED_ROUNDS = (3, 6), 12
# The two fastest must agree so well, or the host goes on: what is measured now is believed for long.
AGREEMENT = 1.05
# What a speculative round is taken to cost, in vanilla steps, where nothing was measured.
UNMEASURED = 1.3


@dataclass(frozen=True)
class Costs:
    """Seconds of a round by method, rows and context."""

    times: Times
    methods: tuple[Method, ...]
    """Those that were measured beside vanilla."""

    def seconds(self, method: Method, num_rows: int, context: int) -> float:
        """Of a round over so many rows of about this length each."""
        measured = self.times.get(method.label)
        if not measured:
            return 1.0 if method == VANILLA else UNMEASURED
        if num_rows in measured:
            return on_line(measured[num_rows], context)
        return self._derived(method, num_rows, context)

    def _derived(self, method: Method, num_rows: int, context: int) -> float:
        """From one row: the target reads its weights once for all nodes of all rows, the draft works for
        each row. What the target takes for so many nodes is known from the rounds that draft nothing."""

        def of_one_row(one: Method) -> float:
            return on_line(self.times[one.label][1], context)

        lookups = [one for one in self.methods if one.source == "lookup"]
        points = sorted((one.num_nodes, of_one_row(one)) for one in (VANILLA, *lookups))
        drafting = max(of_one_row(method) - on_line(points, method.num_nodes), 0.0)
        return on_line(points, num_rows * method.num_nodes) + drafting * (1 + num_rows) / 2


def on_line(points: Sequence[tuple[int, float]], place: float) -> float:
    """The value at `place` on the line through the nearest two of the points, which come in order.

    Before the first point it is that one's; behind the last it never falls.
    """
    if len(points) == 1 or place <= points[0][0]:
        return points[0][1]
    right = next((index for index, (at, _) in enumerate(points) if place <= at), len(points) - 1)
    (left_at, left), (right_at, last) = points[right - 1], points[right]
    slope = (last - left) / (right_at - left_at)
    if place > right_at:
        slope = max(slope, 0.0)
    return last + slope * (place - right_at)


def measure(
    device: Device,
    methods: tuple[Method, ...],
    width: int,
    on_measured: Callable[[int], None] = lambda number: None,
) -> Times:
    """Time a round of every method and of vanilla, while no sequence runs."""
    on_gpu = device.models.target.device.type == "cuda"
    timed = {one.label: one.in_full().fit(device.models, width=width) for one in (VANILLA, *methods)}
    found: Times = {label: {} for label in timed}
    with torch.inference_mode():
        for num_rows, contexts in places(device).items():
            for name, context, seconds in _time(device, timed, num_rows, contexts, on_gpu):
                found[name].setdefault(num_rows, []).append((context, seconds))
                on_measured(1)
        _rest(device)
    return {name: {rows: sorted(points) for rows, points in by.items()} for name, by in found.items()}


def places(device: Device) -> dict[int, tuple[int, ...]]:
    """The numbers of rows, and the contexts, at which rounds are timed."""
    captured = device.models.fused
    room = device.slots.text.shape[1] - (CAPTURED_ROUNDS + 4) * 16
    contexts = [max(1, min(one, room)) for one in (CAPTURED_CONTEXTS if captured else HOST_CONTEXTS)]
    every = tuple(sorted(set(contexts)))
    return {rows: every if rows <= 16 else every[:2] for rows in (device.buckets if captured else (1,))}


def _time(
    device: Device, methods: Mapping[str, Method], num_rows: int, contexts: tuple[int, ...], on_gpu: bool
) -> Iterator[tuple[str, int, float]]:
    for context in contexts:
        times: dict[str, list[float]] = {name: [] for name in methods}
        if on_gpu:
            for name, method in methods.items():
                yield name, context, _captured_seconds(device, method, num_rows, context)
            continue
        # By turns, so that what else the machine does disturbs all alike; the least disturbed turn counts.
        least, most = HOST_ROUNDS
        open_names = list(methods)
        for turn in range(most + 1):
            for name in open_names:
                place_rows(device, num_rows, context)
                started = time.perf_counter()
                device.round(methods[name], num_rows, [True] * num_rows, False).read()
                if turn > 0:  # the first has the set-up of kernels in it
                    times[name].append(time.perf_counter() - started)
            if turn >= least:
                unsettled = {name for name in open_names if not _agree(times[name])}
                # All the others are held against vanilla, which is therefore timed to the end.
                open_names = [name for name in methods if name in unsettled | {"vanilla"} and unsettled]
        for name in methods:
            yield name, context, min(times[name])


def _captured_seconds(device: Device, method: Method, num_rows: int, context: int) -> float:
    def rounds(count: int) -> float:
        place_rows(device, num_rows, context)
        started = time.perf_counter()
        report: Report | None = None
        for _ in range(count):
            report = device.round(method, num_rows, [True] * num_rows, False)
        assert report is not None
        report.read()
        return (time.perf_counter() - started) / count

    rounds(3)
    return rounds(CAPTURED_ROUNDS)


def _agree(seconds: list[float]) -> bool:
    fastest, second = sorted(seconds)[:2]
    return second <= AGREEMENT * fastest


def place_rows(device: Device, num_rows: int, context: int) -> None:
    """Let rows stand behind so many tokens, none of which mean anything. Their pages may be the same ones:
    no sequence has any."""
    rows = device.slots.first(num_rows)
    pages = device.models.pages.num_pages
    numbers = torch.arange(rows.tables.numel(), device=rows.tables.device).view(rows.tables.shape)
    rows.tables.copy_(numbers % pages + 1)
    rows.lengths.fill_(context)
    rows.limits.fill_(device.slots.text.shape[1] - 1)
    rows.running.fill_(True)
    rows.num_unread.fill_(1)


def _rest(device: Device) -> None:
    """As if nothing had been timed."""
    device.release(range(device.max_rows))
    if device.slots.ring is not None:
        device.slots.ring.positions.fill_(-1)


@dataclass(frozen=True)
class Memory:
    """What is remembered on disk of one model on one machine."""

    times: Times
    tries: int
    is_quiet: bool
    """Whether nothing else took the processors."""

    # Where it is never quiet, what was found in so many tries must do.
    MOST_TRIES = 3

    @property
    def is_settled(self) -> bool:
        """Whether it need not be measured again."""
        return self.is_quiet or self.tries >= self.MOST_TRIES

    def after(self, times: Times, is_quiet: bool) -> Memory:
        """With new times: of two tries that were disturbed, the faster figures."""
        if is_quiet:
            return Memory(times, 1, is_quiet)
        least = {
            name: {
                rows: [
                    (context, min(seconds, old))
                    for (context, seconds), (_, old) in zip(lines, self.times[name][rows], strict=True)
                ]
                for rows, lines in by.items()
            }
            for name, by in times.items()
        }
        return Memory(least, self.tries + 1, is_quiet)


def memory_path(device: Device, methods: tuple[Method, ...]) -> Path:
    """Where that is kept: by what is measured, and everything that the times depend on."""
    models = device.models
    target, draft = models.target, models.draft
    facts = [
        *(__version__, torch.__version__, repr(target.config), str(target.dtype)),
        *(
            [
                [one.label for one in methods],
                {str(rows): at for rows, at in places(device).items()},
                models.fused,
            ]
        ),
        (repr(draft.config), type(draft.qkv).__name__) if draft else None,
        type(target.attention).__name__,
        device_name(target.device),
        torch.get_num_threads(),
    ]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    return cache_dir() / "calibration" / f"{key}.json"


def read_memory(path: Path) -> Memory | None:
    """What is there; None where there is nothing, or it is damaged: it is measured again then."""
    try:
        found = json.loads(path.read_text())
        times = {
            str(name): {
                int(rows): [(int(context), float(seconds)) for context, seconds in lines]
                for rows, lines in by.items()
            }
            for name, by in found["times"].items()
        }
        return Memory(times, int(found["tries"]), bool(found["is_quiet"]))
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None


def write_memory(path: Path, memory: Memory) -> OSError | None:
    """Keep it for next time; a disk that refuses only costs the measuring then."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(memory), indent=1).encode())
    except OSError as error:
        return error
    return None


def known_costs(device: Device, methods: tuple[Method, ...], width: int, progress: bool = False) -> Costs:
    """What is remembered of these methods on this machine, or measured now and remembered."""
    path = memory_path(device, methods)
    known = read_memory(path)
    if known is None or not known.is_settled:
        if progress:
            print("longspec: measuring this machine (once)", file=sys.stderr)
        load, where = Load(), places(device)
        with count_bar("measuring", (len(methods) + 1) * sum(map(len, where.values())), progress) as advance:
            times = measure(device, methods, width, advance)
        is_quiet = device.models.target.device.type != "cpu" or load.is_quiet()
        known = Memory(times, 1, is_quiet) if known is None else known.after(times, is_quiet)
        if progress and not known.is_settled:
            print(
                "longspec: other programs are at work here, so it is measured again next time",
                file=sys.stderr,
            )
        error = write_memory(path, known)
        if error is not None:
            print(f"longspec: could not remember the measurements: {error}", file=sys.stderr)
    return Costs(known.times, methods)


class Load:
    """Watches, from now on, how much of the processors other programs take."""

    # A processor's share that is no disturbance: some service is always at work.
    _NOTHING = 0.2
    # The system counts by hundredths of a second, so in less than this many seconds it tells nothing.
    _LEAST = 0.1

    def __init__(self) -> None:
        self._started = self._now()

    def is_quiet(self) -> bool:
        """Whether the others left this program as many processors as it has threads."""
        wall, everyone, ours = (now - then for now, then in zip(self._now(), self._started, strict=True))
        if wall < self._LEAST:
            return False  # soon measured again
        free = (os.cpu_count() or 1) - torch.get_num_threads()
        return (everyone - ours) / wall <= max(free, 0) + self._NOTHING

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds: of the clock, of all processors at work, and of those at work for this program."""
        ours = time.process_time()
        try:
            user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:9])
        except (OSError, ValueError):
            return time.monotonic(), ours, ours  # another system: taken to be quiet
        ticks = user + nice + system + sum(interrupts)
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), ours
