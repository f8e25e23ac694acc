"""List the models that have a short name, with their drafts and what is already on disk.

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
    from longspec.hub import DEFAULT_TARGET, MODELS, default_draft, on_disk, shipped_draft
    from longspec.hub.embedded import REQUIREMENT

    rows = [
        {
            "name": entry.name,
            "target": entry.target,
            "source": "hub" if entry.target else f"PyPI {REQUIREMENT}",
            "draft": default_draft(entry),
            "draft_shipped": shipped_draft(entry.name) is not None,
            "context": entry.context,
            "default": entry.name == DEFAULT_TARGET,
            "on_disk": on_disk(entry),
        }
        for entry in MODELS.values()
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    line = "{:<14}  {:>7}  {:<7}  {:<35}  {}"
    print(line.format("name", "context", "on disk", "target", "draft"))
    for row in rows:
        here = "yes" if row["on_disk"] else "no"
        target, draft = row["target"] or f"(default) {row['source']}", row["draft"] or "none yet"
        draft = f"{draft} (comes with longspec)" if row["draft_shipped"] else draft
        print(line.format(row["name"], row["context"], here, target, draft))
    return 0
