"""Put what runs measured of a draft into its folder: the acceptance that `auto` plans by, and the card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspec.atomic import write_whole
from longspec.bench.folder import Row, read_run
from longspec.bench.report import table
from longspec.bench.settings import read_method
from longspec.bench.summary import acceptance, summarise
from longspec.decoding.methods import Seq, Tree
from longspec.errors import UserError
from longspec.records import read_record

MEASURED = "## Measured"
"""The heading of the measurements in a draft's card."""


def note_acceptance(runs: Sequence[Path], draft: Path) -> dict[str, Any]:
    """Write into a draft's folder what these runs measured with it; returns the table."""
    if not (draft / "config.json").is_file():
        raise UserError(f"{draft} is no draft folder: it has no config.json")
    found = [read_run(path) for path in runs]
    rows = [row for _, own in found for row in own]
    measured = acceptance_table(rows)
    if not measured:
        raise UserError(
            f"{', '.join(map(str, runs))}: no rows at temperature 0 of seq or of a whole tree; "
            "measure with --methods seq:4,tree:4x16x16 --temperature 0"
        )
    config = read_record(draft / "config.json", dict[str, Any])
    write_whole(draft / "config.json", json.dumps(config | {"acceptance": measured}, indent=1).encode())
    card = (draft / "README.md").read_text(encoding="utf-8") if (draft / "README.md").is_file() else ""
    kept = card.partition(MEASURED)[0].rstrip()
    write_whole(draft / "README.md", f"{kept}\n\n{_measured(found)}".lstrip().encode())
    return measured


def acceptance_table(rows: Sequence[Row]) -> dict[str, Any]:
    """`chain` and `trees`: the share of rounds that kept a token at depth 1, 2, ..., all prompts together."""
    chains: dict[int, list[float]] = {}
    trees: dict[str, list[float]] = {}
    greedy = [row for row in rows if row["temperature"] == 0 and row["method"].startswith(("seq", "tree"))]
    for label in dict.fromkeys(row["method"] for row in greedy if "=" not in row["method"]):
        method, _ = read_method(label)
        own = [row for row in greedy if row["method"] == label and row["repeat"] == 0]
        if isinstance(method, Seq):
            chains[method.gamma] = _shares(own, method.gamma)
        elif isinstance(method, Tree):
            trees[method.key] = _shares(own, method.depth)
    return ({"chain": chains[max(chains)]} if chains else {}) | ({"trees": trees} if trees else {})


def _shares(rows: Sequence[Row], depth: int) -> list[float]:
    return [round(share, 4) for share in [*acceptance(rows), *[0.0] * depth][:depth]]


def _measured(found: Sequence[tuple[dict[str, Any], list[Row]]]) -> str:
    parts = [MEASURED]
    for run, rows in found:
        facts = run["facts"]
        where = f"{facts['environment'].get('processor')}, {facts['environment'].get('dtype')}"
        lines = [
            [one.name, str(one.items), f"{one.prompt_tokens:,}", f"{one.temperature:g}", one.method]
            + ["-" if tau is None else f"{tau:.2f}" for tau in (one.tau, one.tau_without_loops)]
            for one in summarise(rows)
            if one.method.startswith(("seq", "tree"))
        ]
        header = ["prompts", "number", "tokens each", "T", "method", "tau", "tau without loops"]
        about = (
            f"Real decoding, answers of at most {facts['max_new_tokens']} tokens ({where}, {run['begun']}):"
        )
        parts += [about, table(header, lines)]
    return "\n\n".join(parts) + "\n"
