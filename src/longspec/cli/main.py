"""`longspec`: the parser, and how errors are shown."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from longspec import __version__
from longspec.cli import bench, chat, data, draft, generate, models, serve, train
from longspec.cli.command import Command, Parser, add_commands, add_debug
from longspec.cli.terminal import one_line, open_streams
from longspec.errors import UserError

_DESCRIPTION = """\
Lossless speculative decoding for long contexts: Llama, Qwen and Mistral models answer faster, same words.

  longspec generate "Why is the sky blue?"      answer once, with the default model
  longspec chat                                 talk to it
  longspec serve                                answer over HTTP, with a page to try it
  longspec models                               models that have a short name
  longspec info qwq                             the size of a model, and the memory that decoding needs
  longspec draft --target ./my-llama -o my-draft  make a draft for a model of yours

Shell completion: longspec completion bash > ~/.local/share/bash-completion/completions/longspec
"""

_COMPLETION = """\
Print a script for completion by the shell.

longspec completion bash > ~/.local/share/bash-completion/completions/longspec
longspec completion zsh > ~/.zfunc/_longspec          with ~/.zfunc in fpath
longspec completion tcsh > ~/.longspec.completion     and `source` it in ~/.tcshrc
"""
_SHELLS = ("bash", "zsh", "tcsh")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Bad input is one line on stderr and code 2."""
    open_streams()
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    warnings.showwarning = _show_warning
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ and getattr(arguments, "tensor_parallel", 1) > 1:
            from longspec.engine.follow import follow_if_told

            follow_if_told(arguments.tensor_parallel)
        code: int = arguments.handler(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _tell("\ninterrupted")
        return 130
    except BrokenPipeError:
        # The reader has ended (`| head`). This is not an error, but nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            error.filename = "standard output"  # errors about files have a name
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A plain ValueError is a bug of ours and keeps its traceback; the user can act on the others.
        if arguments.debug or not isinstance(error, (UserError, OSError, MemoryError)):
            raise
        _tell(f"longspec: error: {_one_line(error)}")
        return 2


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    if not argv:
        parser.print_help()
        parser.exit()
    for word in argv:
        if word.startswith("--") and word.endswith("=--"):  # argparse would take it for an empty list
            parser.error(f"{word} has no value")
    arguments, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-")]
    if rest and not unknown:
        unknown = _append(arguments, rest)
    if unknown:
        flags = {flag.lstrip("-"): flag for flag in arguments.parser._option_string_actions}
        name = unknown[0].lstrip("-").partition("=")[0].replace("_", "-")
        close = get_close_matches(name, flags, n=1) if unknown[0].startswith("-") else []
        hint = f"; did you mean {flags[close[0]]}?" if close else ""
        arguments.parser.error(f"{' '.join(unknown)} is unknown{hint}")
    return arguments


def _append(arguments: argparse.Namespace, words: list[str]) -> list[str]:
    """Add words that follow a flag to the command's list of words, where argparse leaves them over; returns
    those that no command takes."""
    parser: Parser = arguments.parser
    for action in parser._get_positional_actions():
        if action.nargs in ("*", "+"):
            try:
                read = [parser._get_value(action, word) for word in words]
            except argparse.ArgumentError as error:
                parser.error(str(error))
            setattr(arguments, action.dest, [*(getattr(arguments, action.dest) or ()), *read])
            return []
    return words


def _parser() -> Parser:
    parser = Parser(prog="longspec", description=_DESCRIPTION)
    add_debug(parser, default=False)
    parser.add_argument("--version", action="version", version=f"longspec {__version__}")
    commands = {
        "generate": generate.GENERATE,
        "chat": chat.CHAT,
        "serve": serve.SERVE,
        "models": models.MODELS,
        "info": models.INFO,
        "draft": draft.DRAFT,
        "data": data.DATA,
        "train": train.TRAIN,
        "export": train.EXPORT,
        "plot": train.PLOT,
        "bench": bench.BENCH,
        "completion": Command(
            _COMPLETION,
            lambda parser: parser.add_argument("shell", choices=_SHELLS, help="whose script"),
            _print_completion,
        ),
    }
    add_commands(parser, commands, "command")
    return parser


def _print_completion(arguments: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(_parser(), arguments.shell))
    return 0


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """One line, as for an error, without the line of code."""
    _tell(f"longspec: warning: {one_line(str(message))}")


def _tell(text: str) -> None:
    """Print to standard error, if that is possible; the exit code says the rest."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _one_line(error: BaseException) -> str:
    return one_line(str(error)) or f"{type(error).__name__} (run again with --debug for the details)"
