"""A command of `longspec`, and its parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from longspec.cli.terminal import one_line


@dataclass(frozen=True)
class Command:
    """A command of `longspec`, or of a command that has commands of its own."""

    about: str
    """Its help page; lists of commands show the first line."""
    add_arguments: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace], int] | None = None
    """Returns the exit code. None for a command that has commands of its own."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows only the required flags in the first line, because there are too many others."""

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None = None
    ) -> None:
        shown = [action for action in actions if action.required or not action.option_strings]
        super().add_usage(usage, shown, [], prefix)


class Parser(argparse.ArgumentParser):
    """Refuses a bad command line with one line; argparse would print a page of usage first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Help, **options)

    def error(self, message: str) -> NoReturn:
        text = one_line(message.removeprefix("argument "))
        self.exit(2, f"longspec: error: {text} (see {self.prog} --help)\n")


def add_commands(parser: argparse.ArgumentParser, commands: Mapping[str, Command], dest: str) -> None:
    """Give `parser` these commands; `dest` will be the name of the chosen one."""
    parsers = parser.add_subparsers(dest=dest, required=True, metavar="COMMAND")
    for name, command in commands.items():
        summary = command.about.splitlines()[0].rstrip(".:")
        added = parsers.add_parser(name, help=summary[0].lower() + summary[1:], description=command.about)
        added.set_defaults(handler=command.run, parser=added)
        # Without a default, because that would override a --debug before the command.
        add_debug(added, default=argparse.SUPPRESS)
        command.add_arguments(added)


def add_debug(parser: argparse.ArgumentParser, default: Any) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of an error"
    )
