"""`longspec bench acceptance`: what runs measured of a draft goes into its folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec bench acceptance`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of `longspec bench`, with this draft")
    parser.add_argument("--draft", required=True, metavar="FOLDER", help="whose config and card are updated")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.bench.acceptance import note_acceptance

    print(json.dumps(note_acceptance([Path(one) for one in arguments.runs], Path(arguments.draft))))
    return 0
