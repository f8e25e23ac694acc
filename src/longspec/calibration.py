"""The plan of `auto`: measured once per model, draft and machine, and remembered on disk."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from longspec import __version__
from longspec.decoding.auto import Costs, Drafting, Plan, candidates, measure, measured_places
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
    options = candidates(draft[0] if draft else None, acceptance)
    path = cache_dir() / "calibration" / f"{_key(target, draft, list(options))}.json"
    costs = _read(path)
    if costs is None:
        if progress:
            print("longspec: measuring this machine for --method auto (once)", file=sys.stderr)
        places = len(list(measured_places(limit)))
        with count_bar("measuring", places * (len(options) + 1), progress) as advance:
            costs = measure(target, draft, options, limit, advance)
        _write(path, costs)
    return Plan(costs, acceptance, options)


def _key(target: Transformer, draft: Drafting | None, names: list[str]) -> str:
    """Everything that a measured time depends on."""
    facts = [
        *(__version__, torch.__version__, repr(target.config), str(target.dtype), names),
        (repr(draft[0].config), type(draft[0].qkv).__name__) if draft else None,
        device_name(target.device),
        torch.get_num_threads(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _read(path: Path) -> Costs | None:
    try:
        seconds = json.loads(path.read_text())
        return Costs({str(name): float(value) for name, value in seconds.items()})
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # not there, or damaged: measured again and written anew


def _write(path: Path, costs: Costs) -> None:
    """Keep it for next time; a disk that will not have it only costs the measuring then."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(costs.seconds, indent=1).encode())
    except OSError as error:
        print(f"longspec: could not remember the measurements: {error}", file=sys.stderr)
