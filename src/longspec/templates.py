"""Render chat templates in a separate process (`longspec.template_process`)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspec.errors import UserError, shown

Conversation = Sequence[dict[str, Any]]


def render_chat(tokenizer: Any, messages: Conversation, open_turn: bool) -> str:
    """The messages in the tokenizer's chat template; with `open_turn` up to where the assistant continues."""
    return render_chats(tokenizer, [messages], open_turn)[0]


def render_chats(tokenizer: Any, conversations: Sequence[Conversation], open_turn: bool) -> list[str]:
    """Render several conversations with one request: it takes about as long as a request for one."""
    try:
        template = tokenizer.get_chat_template()
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    except Exception as error:  # a tokenizer file can hold anything instead of a template
        raise UserError(
            f"the target has no usable chat template: {shown(str(error), quoted=False)}"
        ) from error
    if not isinstance(template, str):
        raise UserError(f"the target's chat template is {shown(template)}; a text is needed")
    values = special | {"tools": None, "documents": None, "add_generation_prompt": open_turn}
    return _process(os.getpid()).render(template, values, [list(messages) for messages in conversations])


def start_early() -> None:
    """Start the process now, so that the first prompt does not wait for it."""
    _process(os.getpid())


@functools.cache
def _process(owner: int) -> _TemplateProcess:
    """One for each of our processes: a forked process must not use the pipe of its parent."""
    made = _TemplateProcess()
    atexit.register(made.stop)
    return made


class _TemplateProcess:
    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._child = self._start()

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        # -P, because the script's folder has modules with common names.
        command = [sys.executable, "-P", str(Path(__file__).with_name("template_process.py"))]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        # In its own session, so that Ctrl-C reaches only this program.
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, start_new_session=True)

    def stop(self) -> int | None:
        """End it; returns its exit code."""
        if os.getpid() == self._owner:
            with contextlib.suppress(BrokenPipeError), self._child:  # which closes its pipes and waits
                self._child.kill()
        return self._child.returncode

    def render(
        self, template: str, values: dict[str, Any], conversations: list[list[dict[str, Any]]]
    ) -> list[str]:
        request = {"template": template, "values": values, "conversations": conversations}
        data = json.dumps(request).encode()
        with self._lock:
            if self._child.poll() is not None:  # ended from outside
                self.stop()
                self._child = self._start()
            try:
                answer = self._ask(data)
            except BaseException as error:
                # After Ctrl-C, too: a late answer must not be taken for the next one.
                code = self.stop()
                self._child = self._start()
                if not isinstance(error, OSError | EOFError):
                    raise
                raise UserError(f"the chat template cannot be rendered: {_reason(code)}") from None
        if "error" in answer:
            raise UserError(f"the chat template refused the messages: {shown(answer['error'], quoted=False)}")
        return list(answer["texts"])

    def _ask(self, data: bytes) -> dict[str, Any]:
        to, back = self._child.stdin, self._child.stdout
        assert to is not None
        assert back is not None
        with contextlib.suppress(BrokenPipeError):  # the exit code says more
            to.write(data + b"\n")
            to.flush()
        line = back.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        return answer


def _reason(code: int | None) -> str:
    if code in (-signal.SIGPROF, -signal.SIGALRM):
        return "it computes for too long"
    return f"it ended the process that renders it (exit code {code})"
