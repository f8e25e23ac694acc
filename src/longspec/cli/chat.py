"""Talk to a model in the terminal.

The conversation keeps its KV: a turn computes only what is new.

  longspec chat
  longspec chat --target qwq --temperature 0.7
  longspec chat --system "You answer in French."

Enter sends; Alt-Enter (or Esc, then Enter) starts a new line; pasted text is one question. The up arrow shows
earlier questions, also of earlier sessions. Ctrl-C stops an answer and keeps what was said; /reset starts a
new conversation; /help shows the keys; /exit or Ctrl-D leaves. Without a terminal, each line of the input is
a question.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from longspec.cli.arguments import (
    add_method_arguments,
    add_model_arguments,
    add_sampling_arguments,
    load,
    options,
    will_calibrate,
)
from longspec.cli.command import Command

if TYPE_CHECKING:
    from collections.abc import Callable

    from prompt_toolkit.history import History

    from longspec.api import LongSpec
    from longspec.options import Options


_KEYS = (
    "Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer, /reset starts a new conversation, "
    "/help shows this, /exit or Ctrl-D leaves."
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="instructions that open the conversation")
    add_model_arguments(parser, rows="1")
    add_sampling_arguments(parser)
    add_method_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    from longspec.cli.terminal import printable
    from longspec.errors import UserError

    chosen = options(arguments)
    model = load(arguments, calibrate=False, max_rows=1)
    if not model.tokenizer.chat_template:
        raise UserError(f"{model.name} has no chat template; use `longspec generate --raw` with it")
    if will_calibrate(arguments):
        _calibrate(model)
    if _has_terminal():
        print(f"{printable(model.name)}: {_KEYS}")
    _talk(model, [{"role": "system", "content": arguments.system}] if arguments.system else [], chosen)
    return 0


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _calibrate(model: LongSpec) -> None:
    """Measure this machine; Ctrl-C stops the measurement, not the chat."""
    try:
        model.calibrate(progress=True)
    except KeyboardInterrupt:
        print("(not measured: method auto uses default costs until the next start)")


def _talk(model: LongSpec, opening: list[dict[str, str]], chosen: Options) -> None:
    """Questions and answers until the user leaves; Ctrl-C does not leave."""
    from longspec.cli.terminal import printable

    # Without a terminal, each line is a question.
    ask = _line_editor() if _has_terminal() else input
    messages = list(opening)
    while True:
        try:
            question = ask().strip()
            command = question.lower()
            if command == "/exit":
                return
            if command == "/help":
                print(_KEYS)
            elif command == "/reset":
                messages = list(opening)
                model.reset()
                print("(a new conversation)")
            elif re.fullmatch("/[a-z]*", command):  # a question may begin with a path
                print(f"{printable(question)} is unknown; there are /help, /reset and /exit")
            elif question:
                _turn(model, messages, question, chosen)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("(Ctrl-D leaves)")


def _turn(model: LongSpec, messages: list[dict[str, str]], text: str, chosen: Options) -> None:
    """One question and its answer. An error, or a stop before the first token, changes nothing."""
    from longspec.cli.terminal import figures, printable, write
    from longspec.errors import UserError

    question = {"role": "user", "content": text}
    asked = [*messages, question]
    try:
        with model.stream(asked, **_within_room(model, asked, chosen)) as stream:
            try:
                for piece in stream:
                    write(piece)
            except KeyboardInterrupt:
                write(" (stopped)")
    except UserError as error:
        print(f"longspec: {printable(str(error))} (/reset starts a new conversation)", file=sys.stderr)
        return
    write("\n")
    if not stream.result.tokens:
        return
    print(figures(stream.result), file=sys.stderr)
    messages += [question, {"role": "assistant", "content": stream.result.text}]


def _within_room(model: LongSpec, messages: list[dict[str, str]], chosen: Options) -> Options:
    """Shorten the last answers, so that a conversation can use the whole context."""
    wanted = chosen.get("max_new_tokens")
    if wanted is None:
        return chosen
    tokens = model.encoder.encode(messages, raw=False, vocab_size=model.target.config.vocab_size)
    # If there is no room at all, `stream` refuses.
    room = max(1, model.engine.max_length - len(tokens))
    return {**chosen, "max_new_tokens": min(wanted, room)}


def _line_editor() -> Callable[[], str]:
    """Reads a question of one or more lines. A terminal marks pasted text, so its lines stay together."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline()

    session: PromptSession[str] = PromptSession(
        "> ", multiline=True, prompt_continuation="  ", key_bindings=keys, history=_history()
    )
    return session.prompt


def _history() -> History:
    """Earlier questions, kept in the cache folder if it can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from longspec.hub import cache_dir

    path = cache_dir() / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


CHAT = Command(__doc__, _add_arguments, _run)
