"""Draw the loss and the acceptance of a training run.

longspec plot outputs/mine                writes outputs/mine/plot.png
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec plot`."""
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("--output", metavar="FILE", help="the picture to write (default: RUN/plot.png)")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.train.plot import plot

    print(plot(Path(arguments.run), Path(arguments.output) if arguments.output else None))
    return 0
