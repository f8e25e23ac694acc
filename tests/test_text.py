"""Streaming text: whole characters, the same text as decoding at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from longspec.text import TextStream

_TOKENIZER: list[Any] = []


@pytest.fixture(autouse=True, scope="module")
def _tokenizer(smollm2_folder: Path) -> None:
    _TOKENIZER.append(AutoTokenizer.from_pretrained(smollm2_folder))


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40))
def test_pieces_are_the_text_and_never_half_a_character(text: str) -> None:
    tokens = _TOKENIZER[0](text, add_special_tokens=False)["input_ids"]
    stream = TextStream(_TOKENIZER[0])
    pieces = [stream.push(token) for token in tokens] + [stream.finish()]
    expected = _TOKENIZER[0].decode(tokens, skip_special_tokens=True)
    assert "".join(pieces) == expected == stream.text
    if "\ufffd" not in expected:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30))
def test_any_tokens_stream_to_what_they_decode_to(tokens: list[int]) -> None:
    stream = TextStream(_TOKENIZER[0])
    for token in tokens:
        stream.push(token)
    stream.finish()
    whole = _TOKENIZER[0].decode(tokens, skip_special_tokens=True)
    # Bytes that are no character may be replaced in other groups when they come one by one.
    assert stream.text.replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_emoji_comes_whole() -> None:
    tokens = _TOKENIZER[0]("a 🦙🏽 b", add_special_tokens=False)["input_ids"]
    stream = TextStream(_TOKENIZER[0])
    pieces = [stream.push(token) for token in tokens]
    assert "" in pieces, "a character of several tokens must have been waited for"
    assert "".join(pieces) == "a 🦙🏽 b"


@settings(max_examples=100, deadline=None)
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_at_the_first_match(text: str, stops: list[str]) -> None:
    tokens = [_TOKENIZER[0].convert_tokens_to_ids(character) for character in text]
    stream = TextStream(_TOKENIZER[0], stops)
    given_out = ""
    for token in tokens:
        given_out += stream.push(token)
        assert not any(stop in given_out for stop in stops)
    given_out += stream.finish()
    ends = sorted((text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text)
    if ends:
        # the row ends with the token that completes the first stop string
        first_end = ends[0][0]
        assert given_out == text[: min(start for end, start in ends if end == first_end)]
        assert stream.stopped
    else:
        assert given_out == text
        assert not stream.stopped
