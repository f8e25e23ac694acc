"""The plans of `auto`: measured once per model, draft, batch and machine, and remembered on disk.

What is measured while other programs take the processors is used, but not believed: it is measured again the
next time, a few times at most, and the least disturbed figures count.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from longspec import __version__
from longspec.decoding.auto import Costs, Plan, candidates
from longspec.decoding.device import replays
from longspec.decoding.methods.make import Drafting, MethodOptions
from longspec.decoding.timing import Times, measure, place_of
from longspec.hub import cache_dir
from longspec.models.files import write_whole
from longspec.models.placement import device_name
from longspec.models.target import Transformer
from longspec.progress import count_bar


@dataclass(frozen=True)
class Planner:
    """Gives the plans for one model on this machine, each measured if it never was."""

    target: Transformer
    draft: Drafting | None
    acceptance: dict[str, Any]
    limit: int
    """Tokens of the longest text."""
    progress: bool
    plans: dict[int, Plan] = field(default_factory=dict)
    """Those that were asked for, by the rows they were asked for."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """One measures at a time, or they would measure each other."""

    def __call__(self, num_rows: int) -> Plan:
        """For requests of so many rows."""
        with self.lock:
            if num_rows not in self.plans:
                self.plans[num_rows] = self._plan(num_rows)
            return self.plans[num_rows]

    def _plan(self, num_rows: int) -> Plan:
        target, acceptance = self.target, self.acceptance
        draft = self.draft[0] if self.draft else None
        options = candidates(draft, acceptance, target.device.type == "cpu", replays(target))
        if not options:
            return Plan(Costs({}), acceptance, options)
        place = place_of(target, self.limit, replays(target), num_rows)
        batch = place[0]
        # What was timed for fewer rows may serve these as well.
        twin = next((plan for plan in self.plans.values() if plan.num_rows == batch), None)
        return twin or Plan(Costs(self._times(options, place)), acceptance, options, batch)

    def _times(self, options: Mapping[str, MethodOptions], place: tuple[int, tuple[int, ...]]) -> Times:
        """What is remembered, or measured now."""
        target, draft, replayed = self.target, self.draft, replays(self.target)
        path = cache_dir() / "calibration" / f"{_key(target, draft, [list(options), place, replayed])}.json"
        known = _read(path)
        if known is not None and known.settled:
            return known.times
        batch, contexts = place
        if self.progress:
            rows = f", {batch} rows" if batch > 1 else ""
            print(f"longspec: measuring this machine for --method auto{rows} (once)", file=sys.stderr)
        work = _Work()
        with count_bar("measuring", (len(options) + 1) * len(contexts), self.progress) as advance:
            times = measure(target, draft, options, place, replayed, advance)
        known = _Measured.after(known, times, target.device.type != "cpu" or work.alone())
        if self.progress and not known.settled:
            print(
                "longspec: other programs are at work here, so it is measured again next time",
                file=sys.stderr,
            )
        _write(path, known)
        return known.times


@dataclass(frozen=True)
class _Measured:
    """What is remembered."""

    times: Times
    tries: int
    alone: bool
    """Whether nothing else took the processors."""

    # Where it is never quiet, what was found in so many tries must do.
    MOST_TRIES = 3

    @property
    def settled(self) -> bool:
        """Whether it need not be measured again."""
        return self.alone or self.tries >= self.MOST_TRIES

    @classmethod
    def after(cls, before: _Measured | None, times: Times, alone: bool) -> _Measured:
        """What is known with these new times: of two tries that were disturbed, the faster figures."""
        if before is None or alone:
            return cls(times, 1, alone)
        least = {
            name: [
                (context, min(seconds, old))
                for (context, seconds), (_, old) in zip(lines, before.times[name], strict=True)
            ]
            for name, lines in times.items()
        }
        return cls(least, before.tries + 1, alone)


class _Work:
    """Watches, from now on, how much of the processors other programs take."""

    # A processor's share that is no disturbance: some service is always at work.
    _NOTHING = 0.2
    # The system counts by hundredths of a second, so in less than this many seconds it tells nothing.
    _LEAST = 0.1

    def __init__(self) -> None:
        self._started = self._now()

    def alone(self) -> bool:
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


def _key(target: Transformer, draft: Drafting | None, what: list[Any]) -> str:
    """What is measured, and everything that the times depend on."""
    facts = [
        *(__version__, torch.__version__, repr(target.config), str(target.dtype), what),
        (repr(draft[0].config), type(draft[0].qkv).__name__) if draft else None,
        type(target.attention).__name__,
        device_name(target.device),
        torch.get_num_threads(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _read(path: Path) -> _Measured | None:
    try:
        found = json.loads(path.read_text())
        times = {
            str(name): [(int(context), float(seconds)) for context, seconds in lines]
            for name, lines in found["times"].items()
        }
        return _Measured(times, int(found["tries"]), bool(found["alone"]))
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None  # not there, or damaged: measured again and written anew


def _write(path: Path, known: _Measured) -> None:
    """Keep it for next time; a disk that will not have it only costs the measuring then."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(known), indent=1).encode())
    except OSError as error:
        print(f"longspec: could not remember the measurements: {error}", file=sys.stderr)
