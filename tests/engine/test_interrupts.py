"""Ctrl-C at every line of the engine's and the stream's own code leaves an engine that still answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# A program of its own, because an engine that is stuck never comes back.
SCRIPT = """
import signal, sys
from types import FrameType

import torch

import longspec.api, longspec.engine.engine
from longspec import LongSpec

FILES = {longspec.api.__file__, longspec.engine.engine.__file__}
torch.set_num_threads(1)
# Whoever runs the tests in the background had interrupts ignored, which is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
model = LongSpec.from_pretrained(sys.argv[1], device="cpu", calibrate=False)


def answer(press_at: int) -> tuple[int, str]:
    passed = 0

    def follow(frame: FrameType, event: str, _: object):
        nonlocal passed
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            passed += 1
            if passed == press_at:
                signal.raise_signal(signal.SIGINT)
        return follow

    with model.stream("Hi", raw=True, method="vanilla", max_new_tokens=3, eos_ids=()) as stream:
        sys.settrace(follow)
        try:
            for _ in stream:
                pass
        finally:
            sys.settrace(None)
    return passed, stream.result.text


whole = answer(0)
lines, stopped = whole[0], 0
for line in range(1, lines + 1):
    try:
        answer(line)
    except KeyboardInterrupt:
        stopped += 1
    assert answer(0)[1] == whole[1], line
assert model.engine.statistics.held_pages == 0
print(lines, stopped)
"""


def test_ctrl_c_at_any_line_leaves_an_engine_that_answers(tiny_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines, stopped = map(int, done.stdout.split())
    assert lines > 100
    assert stopped == lines
