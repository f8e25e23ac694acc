"""Chat templates are programs of others: they may take little, and what they say is shown without effect."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from longspec.errors import UserError
from longspec.hub.registry import VICUNA_CHAT_TEMPLATE
from longspec.prompts import PromptEncoder
from longspec.templates import render_chat

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is 1 < 2 & 'é' > \"e\"?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
    {"role": "user", "content": "Why?\n"},
]
FEATURES = """\
{%- set ns = namespace(last='') -%}
{%- for message in messages if message.role != 'system' -%}
  {%- if loop.index > 9 -%}{%- break -%}{%- endif -%}
  {% generation %}{{ message | tojson }}{% endgeneration %}
  {%- set ns.last = message['content'].split('</think>')[-1] | trim -%}
{% endfor %}
{{ ns.last }}{{ bos_token }}
{%- if tools is none and add_generation_prompt %}{{ strftime_now('%Y') }}{% endif %}
"""


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Any:
    return PromptEncoder(smollm2_folder).tokenizer


@pytest.mark.parametrize("template", [None, VICUNA_CHAT_TEMPLATE, FEATURES])
@pytest.mark.parametrize("open_turn", [True, False])
def test_they_say_what_transformers_says(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str | None, open_turn: bool
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template or tokenizer.chat_template)
    expected = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=open_turn)
    assert render_chat(tokenizer, TALK, open_turn) == expected


GROWING = (
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "for too long"),
        ("{{ 'a' * 10**10 }}", "more than 1024 MiB of memory"),
        # Where memory is slow, filling it takes longer than a template may.
        (GROWING, "more than 1024 MiB of memory|for too long"),
        ("{{ 'a'.ljust(20000000) }}", "writes more than 16,777,216 characters"),
        ("{{ raise_exception('\x1b[2J') }}", r"refused the messages: \\x1b\[2J"),
        ("{% if %}", "refused the messages: Expected an expression"),
        ("{{ " + 9999 * "(" + " }}", "recursion"),
        ("{{ namespace(__class__=1) }}", "underscore"),
    ],
)
def test_what_they_may_take_is_bounded(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str, said: str
) -> None:
    good = tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", template)
    started = time.monotonic()
    with pytest.raises(UserError, match=said) as caught:
        render_chat(tokenizer, TALK, True)
    assert time.monotonic() - started < 10
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(tokenizer, "chat_template", good)
    assert "Why?" in render_chat(tokenizer, TALK, True)


def test_the_process_that_renders_ends_with_the_program(tiny_folder: Path) -> None:
    """Also one that was replaced; Python's development mode tells of pipes and processes that are left."""
    program = f"""
import os
from pathlib import Path
from longspec.prompts import PromptEncoder
from longspec.templates import _process, render_chat

tokenizer = PromptEncoder(Path({str(tiny_folder)!r})).tokenizer
for _ in range(2):
    assert "Why?" in render_chat(tokenizer, [{{"role": "user", "content": "Why?"}}], True)
    _process(os.getpid())._child.kill()
    _process(os.getpid())._child.wait()
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning" not in done.stderr
