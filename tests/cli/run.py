"""The command line in this process."""

from __future__ import annotations

from collections.abc import Sequence

from longspec.cli.main import main


def exit_code(argv: Sequence[str]) -> object:
    """The code that the program would end with, whether a flag or a later check refuses."""
    try:
        return main(argv)
    except SystemExit as stop:
        return stop.code
