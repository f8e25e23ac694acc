"""The seconds of a round on this machine: measured once for each method and number of rows, and kept on disk.

If other programs used the processors meanwhile, the next load measures again, up to `Calibration.MOST_TRIES`
times in all, and the shortest times count.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from longspec import __version__
from longspec.atomic import write_whole
from longspec.decoding.methods import VANILLA, Method
from longspec.decoding.round import Models
from longspec.engine.device import Device
from longspec.engine.interrupts import undisturbed
from longspec.engine.threads import FreeThreads, ProcessorLoad
from longspec.engine.transfer import Report
from longspec.errors import UserError
from longspec.hub import cache_dir
from longspec.models.placement import device_name
from longspec.native.build import code_hash
from longspec.progress import count_bar
from longspec.records import read_record

Timed = tuple[str, int, int, float]
"""A method's label, the number of rows, the context, and the seconds of a round."""
# Contexts at which rounds are timed.
PLAIN_CONTEXTS, CAPTURED_CONTEXTS = (256, 2048), (512, 8192, 65536)
# Rounds that are timed after a warm-up; for plain rounds, the fewest and the most.
PLAIN_ROUNDS, CAPTURED_ROUNDS = (3, 6), 12
# Plain rounds are timed until the two fastest agree within this factor, because the result is kept.
AGREEMENT = 1.05
# The share of one processor that other programs may use, because some service is always at work, and the
# seconds of watching that say something about it.
_NEGLIGIBLE, _LEAST_WATCHED = 0.2, 0.1
# The assumed cost of a speculative round, in vanilla steps, while nothing is measured.
UNMEASURED = 1.3


@dataclass(frozen=True)
class Costs:
    """Seconds of a round by method, rows and context."""

    times: Mapping[str, Mapping[int, Sequence[tuple[int, float]]]]
    """By a method's label and the number of rows: (context, seconds)."""
    methods: tuple[Method, ...]
    """The methods that were measured beside vanilla."""

    @classmethod
    def of(cls, timed: Iterable[Timed], methods: tuple[Method, ...]) -> Costs:
        times: dict[str, dict[int, list[tuple[int, float]]]] = {}
        for label, num_rows, context, seconds in sorted(timed):
            times.setdefault(label, {}).setdefault(num_rows, []).append((context, seconds))
        return cls(times, methods)

    def seconds(self, method: Method, num_rows: int, context: int, num_drafted: float | None = None) -> float:
        """The seconds of a round over `num_rows` rows of about `context` tokens each. If chains end early,
        they have `num_drafted` tokens on average."""
        measured = self.times.get(method.label)
        if not measured:
            return 1.0 if method == VANILLA else UNMEASURED
        if num_drafted is not None:
            chains = [one for one in self.methods if one.name == method.name]
            points = sorted((one.depth, self.seconds(one, num_rows, context)) for one in chains)
            return interpolate(points, num_drafted)
        if num_rows in measured:
            return interpolate(measured[num_rows], context)
        return self._derived(method, num_rows, context)

    def _derived(self, method: Method, num_rows: int, context: int) -> float:
        """An estimate from the times of one row. The target reads its weights once for all nodes of all rows;
        rounds without a draft show its time for that many nodes. The draft's time grows with the rows."""

        def of_one_row(one: Method) -> float:
            return interpolate(self.times[one.label][1], context)

        lookups = [one for one in self.methods if one.source == "lookup"]
        points = sorted((one.num_nodes, of_one_row(one)) for one in (VANILLA, *lookups))
        drafting = max(of_one_row(method) - interpolate(points, method.num_nodes), 0.0)
        return interpolate(points, num_rows * method.num_nodes) + drafting * (1 + num_rows) / 2


def interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """The value at x on the line through the nearest two of the sorted points (x, value).

    Before the first point it is constant; behind the last it continues the line, but never falls.
    """
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    right = next((index for index, (at, _) in enumerate(points) if x <= at), len(points) - 1)
    (left_x, left), (right_x, last) = points[right - 1], points[right]
    slope = (last - left) / (right_x - left_x)
    if x > right_x:
        slope = max(slope, 0.0)
    return last + slope * (x - right_x)


def measure(
    device: Device, methods: tuple[Method, ...], on_measured: Callable[[int], None] = lambda number: None
) -> list[Timed]:
    """Time a round of vanilla and of every method, while no sequence runs."""
    on_gpu = device.models.target.device.type == "cuda"
    width = draft_width(methods, device.models)
    timed = {one.label: one.in_full().fit(device.models, width=width) for one in (VANILLA, *methods)}
    found: list[Timed] = []
    with torch.inference_mode():
        try:
            for num_rows, contexts in timed_sizes(device).items():
                for name, context, seconds in _time(device, timed, num_rows, contexts, on_gpu):
                    found.append((name, num_rows, context, seconds))
                    on_measured(1)
        finally:  # also after Ctrl-C between two rounds
            device.rest()
    return found


def draft_width(methods: Iterable[Method], models: Models) -> int:
    """The most tokens that the draft may have to read at a time, if any of these methods ran before."""
    return max((one.fit(models).depth for one in methods), default=0) + 1


def timed_sizes(device: Device) -> dict[int, tuple[int, ...]]:
    """The numbers of rows, and the contexts, at which rounds are timed."""
    captured = device.models.fused
    room = device.slots.text.shape[1] - (CAPTURED_ROUNDS + 4) * 16
    contexts = [max(1, min(one, room)) for one in (CAPTURED_CONTEXTS if captured else PLAIN_CONTEXTS)]
    every = tuple(sorted(set(contexts)))
    return {rows: every if rows <= 16 else every[:2] for rows in (device.buckets if captured else (1,))}


def _time(
    device: Device, methods: Mapping[str, Method], num_rows: int, contexts: tuple[int, ...], on_gpu: bool
) -> Iterator[tuple[str, int, float]]:
    for context in contexts:
        times: dict[str, list[float]] = {name: [] for name in methods}
        if on_gpu:
            for name, method in methods.items():
                with undisturbed():
                    seconds = _captured_seconds(device, method, num_rows, context)
                yield name, context, seconds
            continue
        # The methods take turns, so that other programs slow all of them alike; the fastest turn counts.
        least, most = PLAIN_ROUNDS
        open_names = list(methods)
        for turn in range(most + 1):
            for name in open_names:
                with undisturbed():
                    device.place_rows(num_rows, context)
                    started = time.perf_counter()
                    device.round(methods[name], num_rows, [True] * num_rows, False).read()
                if turn > 0:  # the first turn also sets up kernels
                    times[name].append(time.perf_counter() - started)
            if turn >= least:
                unsettled = {name for name in open_names if not _agree(times[name])}
                # Vanilla is timed to the end, because all the others are compared with it.
                open_names = [name for name in methods if name in unsettled | {"vanilla"} and unsettled]
        for name in methods:
            yield name, context, min(times[name])


def _captured_seconds(device: Device, method: Method, num_rows: int, context: int) -> float:
    def rounds(count: int) -> float:
        device.place_rows(num_rows, context)
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


@dataclass(frozen=True)
class Calibration:
    """The times of one model on one machine, as they are kept on disk."""

    times: list[Timed]
    tries: int
    is_quiet: bool
    """Whether no other program used the processors meanwhile."""

    # On a machine that is never quiet, the result of so many tries is trusted.
    MOST_TRIES = 3

    @property
    def is_settled(self) -> bool:
        """Whether it is trusted from now on."""
        return self.is_quiet or self.tries >= self.MOST_TRIES

    def covers(self, methods: Iterable[Method], sizes: Mapping[int, Sequence[int]]) -> bool:
        """Whether it has exactly these methods, numbers of rows and contexts."""
        places = [(rows, context) for rows, contexts in sizes.items() for context in contexts]
        wanted = [(method.label, *place) for method in methods for place in places]
        return sorted(one[:3] for one in self.times) == sorted(wanted)

    def after(self, times: list[Timed], is_quiet: bool) -> Calibration:
        """With new times: of two tries that were both disturbed, the shorter times."""
        if is_quiet:
            return Calibration(times, 1, is_quiet)
        known = {one[:3]: one[3] for one in self.times}
        least = [(*one[:3], min(one[3], known[one[:3]])) for one in times]
        return Calibration(least, self.tries + 1, is_quiet)


def calibration_path(device: Device, methods: tuple[Method, ...]) -> Path:
    """The file's name is a hash of what is measured and of everything that the times depend on."""
    models = device.models
    target, draft = models.target, models.draft
    facts = [
        __version__,
        torch.__version__,
        repr(target.config),
        str(target.dtype),
        target.weights,
        target.kv,
        [one.label for one in methods],
        {str(rows): contexts for rows, contexts in timed_sizes(device).items()},
        models.fused,
        models.exact,
        (repr(draft.config), type(draft.qkv).__name__) if draft else None,
        type(target.attention).__name__,
        (type(target.head).__name__, *(str(one.dtype) for one in target.head.state_dict().values())),
        code_hash() if target.device.type == "cpu" else None,
        device_name(target.device),
        torch.get_num_threads(),
        None if target.shard is None else target.shard.size,
    ]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    return cache_dir() / "calibration" / f"{key}.json"


def read_calibration(path: Path) -> Calibration | None:
    """The times in the file; None where it is missing or damaged, so that the caller measures again."""
    try:
        found = read_record(path, Calibration)
    except UserError:
        return None
    return found if found.tries >= 1 and all(seconds > 0 for *_, seconds in found.times) else None


def _is_quiet(load: ProcessorLoad) -> bool:
    """Whether other programs left this one as many processors as it has threads."""
    if load.seconds < _LEAST_WATCHED:
        return False  # so the next load measures again
    return load.others() <= max(load.num_processors - torch.get_num_threads(), 0) + _NEGLIGIBLE


def known_costs(device: Device, methods: tuple[Method, ...], progress: bool = False) -> Costs:
    """The costs of these methods on this machine: read from disk, or measured now and kept there."""
    path = calibration_path(device, methods)
    known, sizes = read_calibration(path), timed_sizes(device)
    if known is not None and not known.covers((VANILLA, *methods), sizes):
        known = None  # the file was changed by hand
    if known is None or not known.is_settled:
        if progress:
            print("longspec: measuring this machine (once)", file=sys.stderr)
        load, on_cpu = ProcessorLoad(), device.models.target.device.type == "cpu"
        count = (len(methods) + 1) * sum(map(len, sizes.values()))
        with FreeThreads(on_cpu) as threads, count_bar("measuring", count, progress) as advance:
            threads.watch()
            times = measure(device, methods, advance)
        is_quiet = not on_cpu or _is_quiet(load)
        known = Calibration(times, 1, is_quiet) if known is None else known.after(times, is_quiet)
        if progress and not known.is_settled:
            print(
                "longspec: other programs are using the processors, so the next load measures again",
                file=sys.stderr,
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(asdict(known), indent=1).encode())
        except OSError as error:  # the measurements can be used without the file
            print(f"longspec: cannot keep the measurements: {error}", file=sys.stderr)
    return Costs.of(known.times, methods)
