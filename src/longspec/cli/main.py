"""`longspec`: the parser, and what happens when something goes wrong."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from longspec import __version__
from longspec.cli.terminal import open_streams, printable

_DESCRIPTION = """\
Lossless speculative decoding for long contexts: Llama and Qwen models answer faster and say the same.

  longspec generate "Why is the sky blue?"      answer once, with the model that comes along
  longspec chat                                 talk to it
  longspec serve                                answer over HTTP, with a page to try it
  longspec models                               models that have a short name
  longspec info qwq                             how large a model is, and what memory decoding takes
  longspec data prepare text.jsonl -o data      tokenise text to train a draft on
"""

_COMMANDS = {
    "generate": "answer one prompt",
    "chat": "talk in the terminal",
    "serve": "serve over HTTP with OpenAI's interface, and a page",
    "models": "list the models that have a short name",
    "info": "show a target's size, and plan the memory of decoding with it",
    "data": "make training data: tokenise text, look at what was made",
    "train": "train a draft for a target",
    "export": "make a draft folder of a training run",
    "plot": "draw the loss and acceptance of a training run",
    "bench": "measure this machine, side by side in one run",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Bad input is one line on stderr and code 2."""
    open_streams()
    arguments = _parser().parse_args(argv)
    warnings.showwarning = _show_warning
    try:
        code: int = import_module(f"longspec.cli.{arguments.command}").run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader left (`| head`): not an error, and nothing more can be said on stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, MemoryError) as error:
        if arguments.debug or not _is_for_users(error):
            raise
        print(f"longspec: error: {printable(_one_line(error))}", file=sys.stderr)
        return 2


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """One line, as for an error, without the place in the code."""
    print(f"longspec: warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)


def _is_for_users(error: BaseException) -> bool:
    """A plain ValueError is a bug of ours and keeps its traceback; the rest the user can act on."""
    from longspec.errors import UserError

    return isinstance(error, (UserError, OSError, MemoryError))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or f"{type(error).__name__} (run again with --debug for the details)"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    debug = "show the traceback of an error"
    common = _Parser(add_help=False)
    # Without a default: it would overrule a --debug that came before the command.
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=debug)
    parser = _Parser(
        prog="longspec", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--debug", action="store_true", help=debug)
    parser.add_argument("--version", action="version", version=f"longspec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        module = import_module(f"longspec.cli.{name}")
        command = commands.add_parser(
            name,
            parents=[common],
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
