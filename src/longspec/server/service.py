"""Requests on their way to the engine and back: limits, the queue, deadlines."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from longspec.api import LongSpec
from longspec.decoding.methods.make import METHODS
from longspec.engine.sequence import Sequence
from longspec.errors import UserError
from longspec.options import read_options
from longspec.server.answer import Answer, Bridge, Choice
from longspec.server.constraint import Grammars
from longspec.server.errors import ApiError
from longspec.server.metrics import Metrics
from longspec.server.schema import Asked, ChatRequest, CompletionRequest

NEED_DRAFT = ("seq", "tree")


@dataclass(frozen=True)
class Limits:
    """What a server takes on."""

    max_queue: int = 256
    """Sequences that may wait beside those that run; beyond them requests are refused."""
    max_seconds: float = 600.0
    """The longest that a request may take."""
    max_body: int = 32_000_000
    """Bytes of a request."""
    body_seconds: float = 60.0
    """The longest that a client may take to send it."""

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_seconds", "max_body"):
            if not 0 <= getattr(self, name) < math.inf or (name != "max_queue" and not getattr(self, name)):
                raise UserError(f"{name} is {getattr(self, name)}; it must be above 0")


class Service:
    """Answers checked requests; lives on the event loop, while a thread of its own leads the engine."""

    def __init__(self, model: LongSpec, defaults: dict[str, Any], limits: Limits) -> None:
        self.model, self.limits = model, limits
        self.defaults = defaults
        """Options of the method, for requests that name none."""
        self.metrics = Metrics(model.engine, model.name)
        self.num_open = 0
        """Sequences that were taken on and have not ended."""
        self.failure: BaseException | None = None
        """What the engine last failed with, until it answers again."""
        self.methods = [name for name in METHODS if model.draft_name or name not in NEED_DRAFT]
        """Those that a request may name."""
        self._created = int(time.time())
        self._grammars = Grammars(model)
        # One thread: a tokenizer must not be used by two at once, and a long document must not hold up the
        # event loop.
        self._worker = ThreadPoolExecutor(1, "longspec-prompts")
        self._bridge: Bridge | None = None
        self.spelled = lru_cache(100_000)(self._spell)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have the engine answer for as long as the context lasts."""
        self._bridge = Bridge(asyncio.get_running_loop())
        with self.model.engine.serving():
            try:
                yield
            finally:
                self._worker.shutdown(cancel_futures=True)

    def about_model(self) -> dict[str, Any]:
        """What /v1/models tells."""
        model = self.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "longspec",
            "max_model_len": model.engine.max_length,
            "draft": model.draft_name,
            "device": str(model.target.device),
            "dtype": str(model.target.dtype).removeprefix("torch."),
            "methods": self.methods,
        }

    def _spell(self, token: int) -> tuple[str, list[int]]:
        """A token's own text and bytes; a token may be part of a character."""
        raw = self._grammars.tokenizer.decode_bytes([token])
        return raw.decode("utf-8", errors="replace"), list(raw)

    @asynccontextmanager
    async def answering(self, asked: Asked) -> AsyncIterator[Answer]:
        """Take a request on; the answer comes while the context lasts, and is given up at its end."""
        self._check_model(asked)
        self._check_room(asked.n)
        work = asyncio.get_running_loop().run_in_executor(self._worker, self._prepare, asked)
        try:
            answer = await work
        except UserError as error:
            raise ApiError(400, str(error), "invalid_value") from error
        sequences = [choice.sequence for choice in answer.choices]
        self._check_room(len(sequences))
        self.num_open += len(sequences)
        try:
            self.model.engine.submit(sequences)
            yield answer
        except UserError as error:
            raise ApiError(400, str(error), "invalid_value") from error
        finally:
            self.num_open -= len(sequences)
            for sequence in sequences:
                self.model.engine.cancel(sequence, waits=False)
            self._note(answer)

    def _note(self, answer: Answer) -> None:
        error = answer.error
        if error is not None and not isinstance(error, UserError):
            self.failure = error
        elif answer.is_finished:
            self.failure = None
        self.metrics.note(answer)

    def _check_model(self, asked: Asked) -> None:
        if asked.model is not None and asked.model != self.model.name:
            message = f"the model {asked.model[:100]!r} does not exist; this server has {self.model.name!r}"
            raise ApiError(404, message, "model_not_found", "model")

    def _check_room(self, wanted: int) -> None:
        """Refuse what would wait behind too many others."""
        most = self.model.engine.scheduler.max_rows + self.limits.max_queue
        if wanted > most:
            raise ApiError(
                400, f"{wanted} answers are asked for; the queue holds {most}", "invalid_value", "n"
            )
        if self.num_open + wanted > most:
            seconds = max(1, math.ceil(self.metrics.mean_seconds))
            raise ApiError(
                429,
                f"the queue is full: {self.num_open} answers are under way; try again in {seconds} s",
                "queue_full",
                headers={"Retry-After": str(seconds)},
            )

    def _prepare(self, asked: Asked) -> Answer:
        """Tokenise the prompts and make the sequences."""
        model = self.model
        prompts = self._prompts(asked)
        options = asked.options() | self.defaults
        if asked.method is not None:
            options["method"] = asked.method
        settings = read_options(options)
        self._check_length(asked, max(map(len, prompts)))
        sequences, texts = model.sequences([one for one in prompts for _ in range(asked.n)], settings)
        choices = []
        for index, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
            if asked.is_constrained and asked.response_format is not None:
                sequence.constraint = self._grammars.constraint(asked.response_format)
            sequence.num_logprobs = asked.num_logprobs
            choices.append(Choice(index, sequence, text, asked))
        answer = Answer(asked, choices, model.name, self, model.engine.num_proposed)
        for choice in choices:
            self._connect(choice, answer)
        return answer

    def _prompts(self, asked: Asked) -> list[list[int]]:
        encoder, size = self.model.encoder, self.model.target.config.vocab_size
        if isinstance(asked, ChatRequest):
            return [encoder.encode([one.as_prompt() for one in asked.messages], False, size)]
        assert isinstance(asked, CompletionRequest)
        if not asked.prompts:
            raise UserError("prompt is empty; give at least one")
        return [encoder.encode(one, True, size) for one in asked.prompts]

    def _check_length(self, asked: Asked, num_prompt: int) -> None:
        room, num_new = self.model.engine.max_length, asked.num_new
        if num_prompt + (num_new or 1) > room:
            wanted = f" and {num_new} new ones are asked for" if num_new else ""
            raise ApiError(
                400,
                f"this server's context holds {room} tokens; the prompt has {num_prompt}{wanted}",
                "context_length_exceeded",
                "messages" if isinstance(asked, ChatRequest) else "prompt",
            )

    def _connect(self, choice: Choice, answer: Answer) -> None:
        """Have the engine tell the event loop what concerns it: of a stream everything, else the end."""
        bridge, times, is_stream = self._bridge, choice.times, answer.asked.stream
        assert bridge is not None, "the server is not running"

        def on_news(sequence: Sequence) -> None:
            times.append(time.perf_counter())
            if is_stream or sequence.finished:
                bridge.put(answer.news)

        choice.sequence.on_news = on_news
