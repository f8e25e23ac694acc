"""Turn tokens into text as they come: only whole characters, and stop strings across token borders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# More replacement characters than this are not an unfinished character, but bytes that are not text. The last
# few of them are still held back, because they may be the beginning of a character.
_NOT_TEXT = 16
_MOST_UNFINISHED = 3


class TextStream:
    """Turns the tokens of one row into pieces of text that never split a character.

    Text that may be the beginning of a stop string is held back until that is clear. A stop string, and what
    follows it, is never given out.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        # In a stream the wrapper of transformers takes longer than the decoding itself.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        options = {"skip_special_tokens": True}
        if backend is None:
            backend, options = tokenizer, options | {"clean_up_tokenization_spaces": False}
        self._decode: Callable[[list[int]], str] = partial(backend.decode, **options)
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._context = 0
        """Where the window of tokens begins that is decoded for each new token."""
        self._settled = 0
        """Tokens before this one were already given out; they are in the window only as context."""
        self._given = 0
        """How many characters of the window were already given out."""
        self._held = ""
        self.text = ""
        """All text that was given out."""
        self.stopped = False
        """Whether a stop string occurred."""
        self.is_whole = False
        """Whether `catch_up` has taken the last token."""

    def push(self, token: int) -> str:
        """Take the next token; returns the text that is now certain, which may be empty."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        return self._give(self._new_text(final=False), final=False)

    def push_and_check(self, token: int) -> bool:
        """Take the next token; returns whether a stop string is complete."""
        self.push(token)
        return self.stopped

    def catch_up(self, tokens: Sequence[int], is_final: bool) -> None:
        """Take the new ones of all `tokens` so far; if they are final, also give out what was held back.

        With stop strings, `push_and_check` has already taken the tokens.
        """
        if is_final and not self._tokens and not self._stop:
            # All at once, because token by token the tokenizer takes longer than a small model.
            self.text = self._decode(list(tokens))
            self.is_whole = True
            return
        if not self._stop and len(tokens) > len(self._tokens):
            self._tokens += tokens[len(self._tokens) :]
            self._give(self._new_text(final=False), final=False)
        if is_final and not self.is_whole:
            self.finish()
            self.is_whole = True

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        return "" if self.stopped else self._give(self._new_text(final=True), final=True)

    def _new_text(self, final: bool) -> str:
        """The new text, without replacement characters at the end, because those may still change."""
        # Earlier tokens are decoded as well, because some tokenizers need them to decide about a space.
        window = self._decode(self._tokens[self._context :])
        unfinished = 0 if final else len(window) - len(window.rstrip(_REPLACEMENT))
        if unfinished > _NOT_TEXT:
            unfinished = _MOST_UNFINISHED
        certain = window[: len(window) - unfinished]
        new, self._given = certain[self._given :], max(self._given, len(certain))
        if not unfinished:
            # Special tokens have no text, so they are no context: keep tokens that have some.
            newest = self._decode(self._tokens[self._settled :])
            if newest:
                self._context = self._settled
            self._settled, self._given = len(self._tokens), len(newest or window)
        return new

    def _give(self, new: str, final: bool) -> str:
        self._held += new
        found = [place for place in map(self._held.find, self._stop) if place >= 0]
        if found:
            self.stopped = True
            given, self._held = self._held[: min(found)], ""
        else:
            keep = 0 if final else self._undecided()
            cut = len(self._held) - keep
            given, self._held = self._held[:cut], self._held[cut:]
        self.text += given
        return given

    def _undecided(self) -> int:
        """How many characters at the end of the held text may be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def pieces_of(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text that each token completes; joined, they are the answer's text."""
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in token_ids]
    if pieces:
        pieces[-1] += stream.finish()
    return pieces
