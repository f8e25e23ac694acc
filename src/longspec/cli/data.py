"""Make training data, and look at what was made.

longspec data prepare text.jsonl --output data     tokenise and pack text
longspec data synthesize --output own --tokens 1M  let the target write it
longspec data info data                            what a dataset holds, and where it is from
longspec data show data --index 3                  a sequence for human eyes
"""

from __future__ import annotations

import argparse
from importlib import import_module

_COMMANDS = {
    "prepare": "longspec.cli.data_prepare",
    "synthesize": "longspec.cli.data_synthesize",
    "info": "longspec.cli.data_info",
    "show": "longspec.cli.data_show",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The commands below `longspec data`."""
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    for name, place in _COMMANDS.items():
        module = import_module(place)
        description = module.__doc__ or ""
        command = commands.add_parser(
            name,
            help=description.splitlines()[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        module.add_arguments(command)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    code: int = import_module(_COMMANDS[arguments.data_command]).run(arguments)
    return code
