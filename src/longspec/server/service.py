"""Requests on their way to the engine and back: limits, the queue, tokenising."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from longspec.decoding.methods.registry import choices
from longspec.engine.sequence import Sequence
from longspec.errors import UserError
from longspec.options import read_options
from longspec.prompts import PromptTooLong
from longspec.server.answer import Answer, Choice
from longspec.server.constraint import Grammars
from longspec.server.errors import ApiError
from longspec.server.link import Link
from longspec.server.metrics import Metrics
from longspec.server.pace import Pacer
from longspec.server.schema import Asked, ChatRequest
from longspec.server.wire import Facts, Row
from longspec.text import TextStream

# Prompts of up to this many characters or token ids take about a millisecond to tokenise.
_SHORT = 16_000


@dataclass(frozen=True)
class Limits:
    """The limits of a server."""

    max_queue: int = 256
    """Sequences that may wait beside those that run; further requests are refused."""
    max_seconds: float = 600.0
    """The most seconds for a request."""
    max_body: int = 32_000_000
    """The most bytes of a request's body."""
    body_seconds: float = 60.0
    """The most seconds for a client to send the body."""

    def __post_init__(self) -> None:
        if self.max_queue < 0:
            raise UserError(f"max_queue is {self.max_queue}; it must be 0 (nobody waits) or more")
        for name in ("max_seconds", "max_body", "body_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; it must be above 0")


class Service:
    """Answers checked requests, on the event loop of the front."""

    def __init__(
        self,
        facts: Facts,
        link: Link,
        defaults: dict[str, Any],
        limits: Limits,
        names: tuple[str, ...] = (),
    ) -> None:
        self.facts, self.link, self.limits = facts, link, limits
        self.defaults = defaults
        """Options of the method, for requests that name none."""
        self.names = names or (facts.name,)
        """The names that requests may give the model. Answers have the first one."""
        self.metrics = Metrics(self.names[0])
        self._num_coming = 0
        """Sequences whose prompts are being tokenised."""
        self.is_failing = False
        """Whether the engine failed at the last request."""
        self._created = int(time.time())
        self._grammars = Grammars(facts.maker)
        # Threads tokenise prompts and check schemas beside the event loop: one thread for short ones, so that
        # they reach the engine in the order in which they came, and another one for those that take seconds.
        self._workers = [ThreadPoolExecutor(1, f"longspec-{size}-prompts") for size in ("short", "long")]
        self._pacer = Pacer()
        self._spelled = lru_cache(100_000)(self._spell)

    @asynccontextmanager
    async def running(self, on_lost: Callable[[], None]) -> AsyncIterator[None]:
        """Keep the link to the engine while the context lasts."""
        await self.link.connect(on_lost)
        await asyncio.get_running_loop().run_in_executor(self._workers[0], self._grammars.prepare)
        try:
            yield
        finally:
            for worker in self._workers:
                worker.shutdown(cancel_futures=True)
            await self.link.close()

    @property
    def num_open(self) -> int:
        """Sequences that were accepted and have not ended."""
        return self._num_coming + self.link.num_open

    def about_model(self, name: str) -> dict[str, Any]:
        facts = self.facts
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "longspec",
            "root": facts.name,
            "max_model_len": facts.maker.max_length,
            "draft": facts.draft_name,
            "device": facts.device,
            "dtype": facts.dtype,
            "weights": facts.weights,
            "kv_dtype": facts.kv_dtype,
            "methods": [
                name
                for name, choice in choices().items()
                if facts.draft_name or not getattr(choice, "uses_draft", False)
            ],
        }

    def _spell(self, token: int) -> tuple[str, list[int]]:
        """A token's own text and bytes; a token may be only a part of a character."""
        try:
            raw = self._grammars.tokenizer.decode_bytes([token])
        except UserError:
            raw = self.facts.maker.encoder.tokenizer.decode([token]).encode()
        return raw.decode("utf-8", errors="replace"), list(raw)

    @asynccontextmanager
    async def answering(self, asked: Asked) -> AsyncIterator[Answer]:
        """Ask the engine to answer a request. The answer fills up while the context lasts; its end cancels
        what is left."""
        begun = time.perf_counter()
        self.check_model(asked.model)
        self._check_room(asked)
        worker = self._workers[asked.prompt_size + asked.schema_size > _SHORT]
        work = asyncio.get_running_loop().run_in_executor(worker, self._prepare, asked)
        self._num_coming += asked.num_answers
        try:
            sequences, texts, grammar = await work
        except UserError as error:
            raise ApiError(400, str(error), "invalid_value") from error
        finally:
            self._num_coming -= asked.num_answers
        answer = Answer(asked, [], self.names[0], self._spelled, begun)

        def on_news(row: Row) -> None:
            if row.end is not None or (asked.stream and len(row.times) == 1):
                answer.news.set()
            elif asked.stream:
                self._pacer.wake(answer.news)

        try:
            stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
            rows = self.link.ask(sequences, stop, grammar, on_news)
            for index, ((number, row), text) in enumerate(zip(rows, texts, strict=True)):
                spelling = TextStream(self.facts.maker.encoder.tokenizer)
                answer.choices.append(Choice(index, number, row, text, spelling, asked))
            yield answer
        except ConnectionError as error:
            raise ApiError(503, "the engine is gone", "engine_error") from error
        finally:
            self.link.cancel([choice.number for choice in answer.choices])
            self._note(answer)

    def _note(self, answer: Answer) -> None:
        error = answer.error
        if error is not None and not error.is_users_fault:
            self.is_failing = True
        elif error is None and answer.is_finished:
            self.is_failing = False
        self.metrics.note(answer)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not here."""
        if name is not None and name not in self.names:
            there = ", ".join(map(repr, self.names))
            message = f"the model {name[:100]!r} does not exist; this server has {there}"
            raise ApiError(404, message, "model_not_found", "model")

    def _check_room(self, asked: Asked) -> None:
        """Refuse a request if too many others wait."""
        wanted = asked.num_answers
        most = self.facts.max_rows + self.limits.max_queue
        if wanted > most:
            message = f"{wanted} answers are asked for; the queue holds {most}"
            raise ApiError(400, message, "invalid_value", "n" if asked.n > most else "prompt")
        if self.num_open + wanted > most:
            seconds = max(1, math.ceil(self.metrics.mean_seconds))
            raise ApiError(
                429,
                f"the queue is full: {self.num_open} answers are under way; try again in {seconds} s",
                "queue_full",
                headers={"Retry-After": str(seconds)},
            )

    def _prepare(self, asked: Asked) -> tuple[list[Sequence], list[TextStream], str | None]:
        settings = read_options(asked.options() | self._method(asked))
        prompts = self._prompts(asked)
        grammar = None
        if asked.is_constrained and asked.response_format is not None:
            grammar = self._grammars.grammar(asked.response_format)
        sequences, texts = self.facts.maker.make([one for one in prompts for _ in range(asked.n)], settings)
        for sequence in sequences:
            sequence.num_logprobs = asked.num_logprobs
        return sequences, texts, grammar

    def _method(self, asked: Asked) -> dict[str, Any]:
        """The method and its options. The server's options apply only to the server's own method."""
        if asked.method in (None, self.defaults.get("method", "auto")):
            return self.defaults
        kept = {name: value for name, value in self.defaults.items() if name == "acceptance"}
        return kept | {"method": asked.method}

    def _prompts(self, asked: Asked) -> list[list[int]]:
        maker, is_chat = self.facts.maker, isinstance(asked, ChatRequest)
        if not asked.prompts:
            raise UserError("prompt is empty; give at least one")
        room, num_new = maker.max_length, asked.num_new
        most = max(0, room - (num_new or 1))
        try:
            return [maker.encoder.encode(one, not is_chat, maker.vocab_size, most) for one in asked.prompts]
        except PromptTooLong as error:
            wanted = f" and {num_new} new ones are asked for" if num_new else ""
            raise ApiError(
                400,
                f"this server's context holds {room} tokens; the prompt has {error.size} tokens{wanted}",
                "context_length_exceeded",
                "messages" if is_chat else "prompt",
            ) from error
