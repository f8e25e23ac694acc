"""Talk to a model in the terminal. The conversation keeps its KV: a turn computes only what is new.

  longspec chat
  longspec chat --target qwq --temperature 0.7
  longspec chat --system "You answer in French."

Ctrl-C stops an answer and keeps what was said; /reset starts anew; /exit or Ctrl-D leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from longspec.cli.arguments import (
    add_method_arguments,
    add_model_arguments,
    add_sampling_arguments,
    load,
    options,
)

if TYPE_CHECKING:
    from longspec.api import LongSpec
    from longspec.options import Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec chat`."""
    parser.add_argument("--system", metavar="TEXT", help="instructions that open the conversation")
    add_model_arguments(parser)
    add_sampling_arguments(parser)
    add_method_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.cli.terminal import printable
    from longspec.errors import UserError

    chosen = options(arguments)
    model = load(arguments, calibrate=arguments.calibrate and arguments.method == "auto", max_rows=1)
    if not model.tokenizer.chat_template:
        raise UserError(f"{model.name} has no chat template; use `longspec generate --raw` with it")
    opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(opening)
    print(f"{printable(model.name)}: /reset starts anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer.")
    with _line_history():
        for line in _lines():
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(opening)
                model.reset()
                print("(a new conversation)")
            elif line.startswith("/"):
                print(f"{printable(line)} is unknown; there are /reset and /exit")
            else:
                _turn(model, messages, line, chosen)
    return 0


def _turn(model: LongSpec, messages: list[dict[str, str]], line: str, chosen: Options) -> None:
    """One question and its answer; an error, or a stop before it begins, leaves the conversation alone."""
    from longspec.cli.terminal import figures, printable, write
    from longspec.errors import UserError

    question = {"role": "user", "content": line}
    try:
        with model.stream(
            [*messages, question], **_within_room(model, [*messages, question], chosen)
        ) as stream:
            try:
                for piece in stream:
                    write(piece)
            except KeyboardInterrupt:
                write(" (stopped)")
    except UserError as error:
        print(f"longspec: {printable(str(error))} (/reset starts anew)", file=sys.stderr)
        return
    write("\n")
    if not stream.result.tokens:
        return
    print(figures(stream.result), file=sys.stderr)
    messages += [question, {"role": "assistant", "content": stream.result.text}]


def _within_room(model: LongSpec, messages: list[dict[str, str]], chosen: Options) -> Options:
    """A conversation goes on to the end of the context, with shorter answers than asked for at last."""
    wanted = chosen.get("max_new_tokens")
    if wanted is None:
        return chosen
    tokens = model.encoder.encode(messages, raw=False, vocab_size=model.target.config.vocab_size)
    # Where there is no room at all, `stream` says so.
    room = max(1, model.engine.max_length - len(tokens))
    return {**chosen, "max_new_tokens": min(wanted, room)}


def _lines() -> Iterator[str]:
    """What the user types, without the empty lines, until the end of the input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")
            continue
        if line:
            yield line


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Arrow keys bring back earlier questions, also from other days."""
    if not sys.stdin.isatty():
        yield
        return
    import readline

    from longspec.hub import cache_dir

    path = cache_dir() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(1000)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
