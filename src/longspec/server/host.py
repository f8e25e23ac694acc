"""The engine's side of a server: takes sequences from the front and sends it their tokens."""

from __future__ import annotations

import contextlib
import socket
import threading
from functools import partial
from queue import SimpleQueue

from longspec.api import LongSpec
from longspec.engine.sequence import Sequence
from longspec.errors import BrokenTarget, UserError
from longspec.server.constraint import Grammars
from longspec.server.wire import Ask, AskStatus, Cancel, End, Facts, News, Packet, Status, receive, send
from longspec.text import TextStream


class Host:
    """Answers the front's requests until the front closes the link."""

    def __init__(self, model: LongSpec, link: socket.socket) -> None:
        self._model, self._engine, self._link = model, model.engine, link
        self._grammars = Grammars(model.maker)
        self._sequences: dict[int, Sequence] = {}
        """Sequences that have not ended, by the front's numbers. The thread that reads the link adds them,
        the thread that leads the engine removes them."""
        self._num_told: dict[int, int] = {}
        self._changed: dict[int, Sequence] = {}
        """Sequences that have news; only the leading thread uses it."""
        self._outbox: SimpleQueue[Packet | None] = SimpleQueue()

    def serve(self) -> None:
        """Answer requests until the front closes the link."""
        model = self._model
        facts = Facts(
            model.name,
            model.draft_name,
            str(model.target.device),
            str(model.target.dtype).removeprefix("torch."),
            model.target.weights,
            model.target.kv,
            self._engine.scheduler.max_rows,
            model.maker,
        )
        with contextlib.suppress(BrokenPipeError):  # the front is gone: the loop below ends at once
            send(self._link, facts)
        self._grammars.prepare()
        sender = threading.Thread(target=self._send_all, name="longspec-sender", daemon=True)
        sender.start()
        with self._engine.serving(self._tell):
            while (message := receive(self._link)) is not None:
                self._take(message)
            for sequence in list(self._sequences.values()):
                self._engine.cancel(sequence)
        self._outbox.put(None)
        sender.join()
        self._engine.check()

    def _take(self, message: Ask | Cancel | AskStatus) -> None:
        if isinstance(message, Cancel):
            for number in message.numbers:
                if (sequence := self._sequences.get(number)) is not None:
                    self._engine.cancel(sequence, waits=False)
        elif isinstance(message, AskStatus):
            scheduler = self._engine.scheduler
            self._outbox.put(Status(len(scheduler.seats), len(scheduler.waiting), self._engine.statistics))
        else:
            try:
                self._ask(message)
            except UserError as error:
                end = End("closed", str(error), is_users_fault=True)
                self._outbox.put(News([(number, [], [], [], [], end) for number, _ in message.rows]))

    def _ask(self, message: Ask) -> None:
        tokenizer, sequences = self._model.tokenizer, dict(message.rows)
        for number, sequence in sequences.items():
            if message.stop:
                sequence.stop_after = TextStream(tokenizer, message.stop).push_and_check
            sequence.on_news = partial(self._note, number)
        if message.grammar is not None:
            constraints = self._grammars.constraints(message.grammar, len(sequences))
            for sequence, constraint in zip(sequences.values(), constraints, strict=True):
                sequence.constraint = constraint
        self._sequences |= sequences
        try:
            self._engine.submit(sequences.values())
        except UserError:
            for number in sequences:
                del self._sequences[number]
            raise

    def _note(self, number: int, sequence: Sequence) -> None:
        self._changed[number] = sequence

    def _tell(self) -> None:
        """Send the news of a turn; called by the thread that leads."""
        try:
            self._engine.check()
        except OSError:
            # A rank is lost: end `serve`, which then raises.
            self._link.shutdown(socket.SHUT_RD)
        if not self._changed:
            return
        rows = []
        for number, sequence in self._changed.items():
            first, known = self._num_told.get(number, 0), len(sequence.tokens)
            self._num_told[number] = known
            end = None
            if sequence.finished:
                end = self._end(sequence)
                del self._num_told[number]
                self._sequences.pop(number, None)
            rows.append(
                (
                    number,
                    sequence.tokens[first:],
                    sequence.depths[first:],
                    sequence.copied[first:],
                    sequence.logprobs[first:],
                    end,
                )
            )
        self._changed.clear()
        self._outbox.put(News(rows))

    def _end(self, sequence: Sequence) -> End:
        error = sequence.error
        is_explained = isinstance(error, UserError)
        is_users_fault = is_explained and not isinstance(error, BrokenTarget)
        proposed = [(rounds, method.num_nodes - 1) for method, rounds in sequence.methods.items()]
        return End(
            sequence.finish_reason or "closed",
            None if error is None else str(error) if is_explained else type(error).__name__,
            is_users_fault,
            sequence.num_shared,
            sum(rounds for rounds, number in proposed if number),
            sum(rounds * number for rounds, number in proposed),
        )

    def _send_all(self) -> None:
        """Send what is in the outbox, in its own thread, because pickling would delay the leading one."""
        with contextlib.suppress(OSError):  # the front is gone, and the thread that reads sees that too
            while (message := self._outbox.get()) is not None:
                send(self._link, message)
