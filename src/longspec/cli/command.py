"""What a command of `longspec` is, and how one gets its parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from longspec.cli.terminal import one_line


@dataclass(frozen=True)
class Command:
    """A name behind `longspec`, or behind a command that has commands of its own."""

    about: str
    """Its help page; the first line stands in lists of commands."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int] | None = None
    """Returns the exit code. None for a command that has commands of its own."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Leaves the flags that need not be given out of the first line: there are too many of them."""

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None = None
    ) -> None:
        shown = [action for action in actions if action.required or not action.option_strings]
        super().add_usage(usage, shown, [], prefix)


class Parser(argparse.ArgumentParser):
    """Refuses a bad command line with one line, where argparse prints a page of usage first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Help, **options)

    def error(self, message: str) -> NoReturn:
        text = one_line(message.removeprefix("argument "))
        self.exit(2, f"longspec: error: {text} (see {self.prog} --help)\n")


def add_commands(parser: argparse.ArgumentParser, commands: Mapping[str, Command], dest: str) -> None:
    """Give `parser` these commands; `dest` will hold the name of the one that is given."""
    parsers = parser.add_subparsers(dest=dest, required=True, metavar="COMMAND")
    for name, command in commands.items():
        summary = command.about.splitlines()[0].rstrip(".:")
        added = parsers.add_parser(
            name,
            help=summary[0].lower() + summary[1:],
            description=command.about,
        )
        added.set_defaults(handler=command.run, parser=added)
        # Without a default, because it would overrule a --debug that stands before the command.
        add_debug(added, default=argparse.SUPPRESS)
        command.add_arguments(added)


def add_debug(parser: argparse.ArgumentParser, default: Any) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of an error"
    )
