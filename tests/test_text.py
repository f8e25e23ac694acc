"""Streaming text: whole characters, the same text as decoding at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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


def llama_like_tokenizer() -> Any:
    """Words begin with their space, which is dropped at the beginning of a text; the rest comes as bytes."""
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hi", "ho", "▁ho"]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


# Specials, words, and the three bytes of a euro sign.
PARTS = [[0], [1], [258], [259], [260], [261], [0xE2 + 2, 0x82 + 2, 0xAC + 2]]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=8))
def test_spaces_survive_special_tokens(parts: list[list[int]]) -> None:
    tokenizer = llama_like_tokenizer()
    stream = TextStream(tokenizer)
    tokens = [token for part in parts for token in part]
    pieces = [stream.push(token) for token in tokens] + [stream.finish()]
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True)


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
