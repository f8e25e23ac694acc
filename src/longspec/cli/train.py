"""`longspec train`, `export` and `plot`: train a draft, and what comes after."""

from __future__ import annotations

import argparse

from longspec.cli.arguments import given_path
from longspec.cli.command import Command
from longspec.cli.terminal import printable
from longspec.train import command

_EXPORT = """\
Make a draft folder of a training run.

It is what `longspec generate --draft` loads, with a model card.

longspec export outputs/mine my-draft
longspec generate --draft my-draft "Why is the sky blue?"
"""
_PLOT = """\
Draw the loss and the acceptance of a training run.

longspec plot outputs/mine                writes outputs/mine/plot.png
"""


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=given_path, metavar="RUN", help="the run's folder; its newest whole checkpoint is taken"
    )
    parser.add_argument("output", type=given_path, metavar="FOLDER", help="the draft folder to write")
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="of the weights: auto (the target's), float32, bfloat16",
    )


def _export(arguments: argparse.Namespace) -> int:
    from longspec.train.export import export

    print(printable(str(export(arguments.run, arguments.output, arguments.dtype))))
    return 0


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=given_path, metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--output", type=given_path, metavar="FILE", help="the picture to write (default: RUN/plot.png)"
    )


def _plot(arguments: argparse.Namespace) -> int:
    from longspec.train.report import plot

    print(printable(str(plot(arguments.run, arguments.output))))
    return 0


TRAIN = Command(command.__doc__, command.add_arguments, command.run)
EXPORT = Command(_EXPORT, _add_export, _export)
PLOT = Command(_PLOT, _add_plot, _plot)
