"""The plan of `auto`: measured once per model, draft and machine, and remembered on disk."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from longspec import __version__
from longspec.decoding.auto import Costs, Plan, candidates
from longspec.decoding.device import replays
from longspec.decoding.methods.make import Drafting
from longspec.decoding.timing import measure, places
from longspec.hub import cache_dir
from longspec.models.files import write_whole
from longspec.models.placement import device_name
from longspec.models.target import Transformer
from longspec.progress import count_bar


def plan_for(
    target: Transformer,
    draft: Drafting | None,
    acceptance: dict[str, Any],
    limit: int,
    progress: bool,
) -> Plan:
    """The plan for this model on this machine, measured if it never was."""
    replayed = replays(target)
    options = candidates(draft[0] if draft else None, acceptance, target.device.type == "cpu", replayed)
    if not options:
        return Plan(Costs({}), acceptance, options)
    where = places(target, limit, replayed)
    path = cache_dir() / "calibration" / f"{_key(target, draft, [list(options), where, replayed])}.json"
    costs = _read(path)
    if costs is None:
        if progress:
            print("longspec: measuring this machine for --method auto (once)", file=sys.stderr)
        total = (len(options) + 1) * sum(len(contexts) for _, contexts in where)
        with count_bar("measuring", total, progress) as advance:
            costs = Costs(measure(target, draft, options, where, replayed, advance))
        _write(path, costs)
    return Plan(costs, acceptance, options)


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


def _read(path: Path) -> Costs | None:
    try:
        times = json.loads(path.read_text())
        return Costs(
            {name: [(int(a), int(b), float(c)) for a, b, c in measured] for name, measured in times.items()}
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # not there, or damaged: measured again and written anew


def _write(path: Path, costs: Costs) -> None:
    """Keep it for next time; a disk that will not have it only costs the measuring then."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(costs.times, indent=1).encode())
    except OSError as error:
        print(f"longspec: could not remember the measurements: {error}", file=sys.stderr)
