"""`longspec bench report`: runs to one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec bench report`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of `longspec bench`")
    parser.add_argument(
        "--output", metavar="FILE", help="the page to write (default: report.html in the first run)"
    )
    parser.add_argument("--answers", type=int, default=4, metavar="N", help="shown in colour (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.bench.report import write_page
    from longspec.errors import UserError

    if arguments.answers < 0:
        raise UserError(f"--answers is {arguments.answers}; it must be 0 or more")
    runs = [Path(one) for one in arguments.runs]
    output = Path(arguments.output) if arguments.output else runs[0] / "report.html"
    write_page(runs, output, arguments.answers)
    print(output)
    return 0
