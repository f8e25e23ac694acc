"""One request while it is answered: its sequences, their tokens, and the form that OpenAI gives them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic_core import to_json

from longspec import __version__
from longspec.server.schema import Asked, ChatRequest, StreamOptions
from longspec.server.wire import End, Row
from longspec.text import TextStream


class Choice:
    """One of the answers to a request."""

    def __init__(
        self, index: int, number: int, row: Row, text: TextStream, spelling: TextStream, asked: Asked
    ) -> None:
        self.index, self.number, self.row, self._text = index, number, row, text
        self._spelling = spelling
        """The text of the tokens whose logprobs were sent, without stop strings."""
        self._by_token = asked.explain or bool(asked.stop)
        self._pieces: list[str] = []
        """The text of each token, if the request needs tokens one by one."""
        self._num_told = self._num_given = 0
        self.is_told = False
        """Whether the end was part of the news."""

    @property
    def finish_reason(self) -> str | None:
        """In OpenAI's words."""
        return {"eos": "stop"}.get(reason, reason) if (reason := self.row.finish_reason) else None

    def news(self) -> Piece | None:
        """What has come since the last call; None if nothing has."""
        row = self.row
        is_final, known = row.end is not None, len(row.tokens)
        if self.is_told:
            return None
        if self._by_token:
            self._pieces += map(self._text.push, row.tokens[len(self._pieces) :])
        self._text.catch_up(row.tokens, is_final)
        first, self._num_told, self.is_told = self._num_told, known, is_final
        text = self._text.text[self._num_given :]
        self._num_given += len(text)
        if not text and not is_final and first == known:
            return None
        return Piece(text, first, known, self.finish_reason)

    def spelled(self, places: range) -> tuple[list[str], list[int]]:
        """For each of these tokens, the text that it adds, and where that text begins in the answer. If
        several tokens make one character, only the last one adds it."""
        texts, offsets = [], []
        for place in places:
            offsets.append(len(self._spelling.text))
            texts.append(self._spelling.push(self.row.tokens[place]))
        if texts and self.row.end is not None:
            texts[-1] += self._spelling.finish()
        return texts, offsets

    def origins(self, news: Piece) -> list[dict[str, Any]]:
        """The text of each new token, and how it came. Together the texts are the new text."""
        row = self.row
        told = [
            {"text": self._pieces[place], "depth": row.depths[place], "copied": row.copied[place]}
            for place in range(news.first, news.known)
        ]
        # Characters that were held back, because they could begin a stop string or be half a character, come
        # at the end of the answer.
        rest = news.text[sum(len(self._pieces[place]) for place in range(news.first, news.known)) :]
        return [*told, {"text": rest, "depth": 0, "copied": False}] if rest else told


@dataclass(frozen=True)
class Piece:
    """A piece of an answer."""

    text: str
    first: int
    """The new tokens are those from `first` up to `known`."""
    known: int
    finish_reason: str | None


@dataclass
class Answer:
    """A request and its choices."""

    asked: Asked
    choices: list[Choice]
    model_name: str
    spell: Callable[[int], tuple[str, list[int]]]
    """A token's own text and bytes."""
    begun: float
    """When the request came, by `time.perf_counter`."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._is_chat = isinstance(self.asked, ChatRequest)
        self._options = self.asked.stream_options or StreamOptions()
        self._is_begun = False
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"

    @property
    def is_finished(self) -> bool:
        return all(choice.row.end is not None for choice in self.choices)

    @property
    def error(self) -> End | None:
        ends = [choice.row.end for choice in self.choices]
        return next((end for end in ends if end is not None and end.error is not None), None)

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = []
        for choice in self.choices:
            news = choice.news()
            assert news is not None, "it is finished"
            choices.append(self._choice(choice, news, is_delta=False))
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._head(kind) | {"choices": choices, "usage": self.usage(), "metrics": self.metrics()}

    def events(self) -> bytes:
        """What has come since the last call, as events of a stream. The first events of a chat have its
        roles."""
        tells_tokens = self.asked.explain or self.asked.num_logprobs is not None
        found = [(choice, news) for choice in self.choices if (news := choice.news()) is not None]
        found = [one for one in found if one[1].text or tells_tokens or one[1].finish_reason]
        if not found:
            return b""
        events = []
        if self._is_chat and not self._is_begun:
            delta = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            events += [self._event([{"index": choice.index, **delta}]) for choice in self.choices]
        self._is_begun = True
        is_over = all(choice.is_told for choice in self.choices)
        for choice, news in found:
            more: dict[str, Any] = {}
            if self.asked.explain:
                more["tokens"] = choice.origins(news)
            if self._options.continuous_usage_stats:
                more["usage"] = self.usage()
            if is_over and choice is found[-1][0]:
                more["metrics"] = self.metrics()
            events.append(self._event([self._choice(choice, news, is_delta=True)], **more))
        return b"".join(events)

    def last_events(self) -> bytes:
        """The end of a stream, with the usage if the client asked for it."""
        usage = self._event([], usage=self.usage()) if self._options.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _choice(self, choice: Choice, news: Piece, is_delta: bool) -> dict[str, Any]:
        body: dict[str, Any] = {"text": news.text}
        if self._is_chat and is_delta:
            body = {"delta": {"content": news.text} if news.text else {}}
        elif self._is_chat:
            body = {"message": {"role": "assistant", "content": news.text}}
        logprobs = None
        if (row := choice.row).num_logprobs is not None:
            end = news.known - (row.finish_reason == "eos")  # without the eos token
            places = range(news.first, max(end, news.first))
            logprobs = (self._chat_logprobs if self._is_chat else self._text_logprobs)(choice, places)
        return {"index": choice.index, **body, "logprobs": logprobs, "finish_reason": news.finish_reason}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return self._event_head + to_json({"choices": choices, **more})[1:] + b"\n\n"

    @cached_property
    def _event_head(self) -> bytes:
        """The beginning of all events of a stream, encoded once."""
        head = self._head("chat.completion.chunk" if self._is_chat else "text_completion")
        return b"data: " + to_json(head)[:-1] + b","

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model_name,
            "system_fingerprint": f"longspec-{__version__}",
            "seed": self.choices[0].row.seed,
        }

    def usage(self) -> dict[str, Any]:
        """Numbers of tokens; a prompt that is answered n times counts once."""
        rows = [choice.row for choice in self.choices]
        prompts = rows[:: self.asked.n]
        num_prompt = sum(row.prompt_tokens for row in prompts)
        num_new = sum(len(row.tokens) for row in rows)
        num_shared = sum(row.end.num_shared for row in prompts if row.end is not None)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_shared},
        }

    def metrics(self) -> dict[str, Any]:
        """The counts of speculation over all choices, under vLLM's names."""
        found = Speculation()
        for choice in self.choices:
            found.add(choice.row)
        return {"speculative_decoding": found.told()}

    def _chat_logprobs(self, choice: Choice, places: range) -> dict[str, Any]:
        told = []
        for place in places:
            chosen, top = choice.row.logprobs[place]
            others = [self._spelled(*one) for one in top]
            told.append(self._spelled(choice.row.tokens[place], chosen) | {"top_logprobs": others})
        return {"content": told, "refusal": None}

    def _text_logprobs(self, choice: Choice, places: range) -> dict[str, Any]:
        """The logprobs of a completion. The chosen token is always among the top ones, under its text in the
        answer; of others that are spelled alike, such as parts of characters, the most probable one is."""
        texts, offsets = choice.spelled(places)
        tops: list[dict[str, float]] = []
        for place, text in zip(places, texts, strict=True):
            token, (chosen, top) = choice.row.tokens[place], choice.row.logprobs[place]
            tops.append({text: chosen})
            for other, value in top:
                if other != token:
                    tops[-1].setdefault(self.spell(other)[0], value)
        scores = [choice.row.logprobs[place][0] for place in places]
        return {"tokens": texts, "token_logprobs": scores, "top_logprobs": tops, "text_offset": offsets}

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self.spell(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": raw}


class Speculation:
    """Counts over rounds that proposed tokens."""

    def __init__(self) -> None:
        self.num_steps = self.num_drafted = self.num_accepted = 0
        self.by_depth: Counter[int] = Counter()
        """Rounds that had a token accepted at each depth."""

    def add(self, row: Row) -> None:
        if row.end is None:
            return
        self.num_steps += row.end.num_steps
        self.num_drafted += row.end.num_drafted
        counts = Counter(row.depths)
        del counts[0]  # the target's own tokens
        self.num_accepted += counts.total()
        self.by_depth.update(counts)

    def told(self) -> dict[str, Any]:
        """vLLM's names. `acceptance_histogram[k]` rounds had exactly k tokens accepted."""
        reached = [
            self.num_steps,
            *(self.by_depth[depth] for depth in range(1, max(self.by_depth, default=0) + 1)),
        ]
        exact = [here - further for here, further in zip(reached, [*reached[1:], 0], strict=True)]
        return {
            "mean_acceptance_length": 1 + self.num_accepted / self.num_steps if self.num_steps else 1.0,
            "draft_acceptance_rate": self.num_accepted / self.num_drafted if self.num_drafted else 0.0,
            "acceptance_histogram": exact,
            "num_spec_steps": self.num_steps,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_drafted,
        }
