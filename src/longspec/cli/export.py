"""Make a draft folder of a training run: what `longspec generate --draft` loads, with a model card.

longspec export outputs/mine my-draft
longspec generate --draft my-draft "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec export`."""
    parser.add_argument("run", metavar="RUN", help="the run's folder; its newest whole checkpoint is taken")
    parser.add_argument("output", metavar="FOLDER", help="the draft folder to write")
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="of the weights: auto (the target's), float32, bfloat16",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.train.export import export

    print(export(Path(arguments.run), Path(arguments.output), arguments.dtype))
    return 0
