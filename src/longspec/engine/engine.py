"""The engine: sequences join and leave at any turn of its loop.

A thread that waits for an answer leads: it runs turns for the sequences of all threads (see
`longspec.engine.loop`). Another waiting thread takes over when the leader has its answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

import torch

from longspec.cache import PagePool
from longspec.decoding.methods import VANILLA, Method, MethodChoice, Tree
from longspec.engine.auto import Outlook, Policy, candidates, unmeasured
from longspec.engine.chunks import exact_grid, is_large
from longspec.engine.costs import CAPTURED_CONTEXTS, Costs
from longspec.engine.device import Device, make_device, row_buckets
from longspec.engine.fill import MOST_SEGMENTS
from longspec.engine.interrupts import undisturbed
from longspec.engine.loop import Loop
from longspec.engine.memory import EngineSize
from longspec.engine.orders import Open
from longspec.engine.ranks import Ranks
from longspec.engine.scheduler import Scheduler
from longspec.engine.sequence import Sequence
from longspec.engine.threads import FreeThreads
from longspec.errors import UserError
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.placement import on_device
from longspec.models.target import Transformer

# Seconds after which a waiting thread checks again without being notified.
_LONGEST_WAIT = 0.2


@dataclass(frozen=True)
class Statistics:
    """What an engine has done so far."""

    num_captures: int
    num_paused: int
    """How often a sequence gave its pages to an older one and was computed again later."""
    prompt_tokens: int
    shared_tokens: int
    """Tokens of prompts whose KV was there already."""
    rounds: Mapping[str, int]
    num_pages: int
    held_pages: int


class Engine:
    """A target, its draft, and all sequences that they answer.

    Any thread may call its methods. The tokens of a sequence do not depend on the sequences beside it.
    """

    def __init__(
        self,
        target: Transformer,
        draft: GlideDraft | None = None,
        head: DraftHead | None = None,
        acceptance: Mapping[str, Any] | None = None,
        *,
        size: EngineSize,
        exact: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.max_length = size.max_length
        self._end: Callable[[], object] = lambda: None
        with torch.inference_mode(), on_device(target.device):
            self.candidates = candidates(draft, acceptance or {}, target.can_fuse)
            """The methods that are measured for `auto`."""
            # Room for the trees of `auto` and for the default tree.
            num_nodes = max(one.num_drafted for one in (Tree(), *self.candidates))
            if ranks is not None:
                ranks.tell(Open(size, num_nodes, exact))
                self._end = weakref.finalize(self, ranks.close)
            self.device = make_device(target, draft, head, size, num_nodes, exact)
        self.device.ranks = ranks
        self.models = self.device.models
        pool = PagePool(size.num_pages, size.page_size)
        self.scheduler = Scheduler(pool, size.max_rows, exact_grid(self.models))
        policy = Policy(unmeasured(draft, target.can_fuse), acceptance or {}, Costs({}, ()))
        self.loop = Loop(self.device, self.scheduler, policy, self.candidates)
        self._known_choices: dict[MethodChoice, MethodChoice] = {}
        self._orders: SimpleQueue[Callable[[], object]] = SimpleQueue()
        """What the thread that leads must do before its next turn."""
        self._leads = threading.Lock()
        self._leader: int | None = None
        self._news = threading.Condition()
        # Ranks share the processors by themselves.
        self._threads = FreeThreads(target.device.type == "cpu" and ranks is None)

    @property
    def policy(self) -> Policy:
        return self.loop.policy

    def adopt(self, costs: Costs) -> None:
        """Let `auto` decide by these costs from now on."""
        self.loop.policy = Policy(self.candidates, self.policy.acceptance, costs)

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences. They are answered while a thread leads (`run`, `lead`, `serving`)."""
        asked = list(sequences)
        for sequence in asked:
            self._check(sequence)
        for sequence in asked:
            # One object for equal methods, so that rounds are grouped without comparing them.
            sequence.method = self._known_choices.setdefault(sequence.method, sequence.method)
            sequence.submitted_at = time.perf_counter()
            self._orders.put(partial(self.scheduler.waiting.append, sequence))

    def _check(self, sequence: Sequence) -> None:
        """Refuse a sequence that can never be answered."""
        pool = self.scheduler.pool
        most = min(self.max_length, pool.num_pages * pool.size)
        if sequence.limit > most:
            raise UserError(f"a sequence of {sequence.limit} tokens exceeds the engine's {most}")
        if isinstance(sequence.method, Method):
            self.loop.fit(sequence.method, sequence.draws)  # refuses what cannot run

    def run(self, sequences: list[Sequence]) -> None:
        """Answer sequences, and raise the first error of any of them."""
        self.submit(sequences)
        try:
            self.lead(lambda: all(sequence.finished for sequence in sequences))
        except BaseException:
            for sequence in sequences:
                self.cancel(sequence)
            raise
        error = next((one.error for one in sequences if one.error is not None), None)
        if error is not None:
            raise error

    def run_each(self, sequences: Iterable[Sequence], ahead: int = 1) -> Iterator[Sequence]:
        """Answer sequences, and yield each when it is finished. They are taken from the iterable when there
        is room for them.

        `ahead` vanilla rounds are launched before the host reads the first of them, because with many rows
        the host could not keep up otherwise. A row that ends meanwhile stops on the device; a new sequence
        waits for these rounds.

        If no other thread uses the engine, the order of the sequences alone decides which of them run
        together, and time does not. So a second run computes the same bits, and processes that share a target
        launch the same work in the same order. What the caller does with a yielded sequence overlaps with the
        GPU's work on the next ones.
        """
        coming, done, scheduler = iter(sequences), deque[Sequence](), self.scheduler
        inside: set[Sequence] = set()
        self.loop.ahead = ahead
        try:
            while True:
                for sequence in islice(coming, max(0, 2 * scheduler.max_rows - len(inside))):
                    inside.add(sequence)
                    sequence.on_news = lambda one: done.append(one) if one.finished else None
                    self.submit([sequence])
                if not inside:
                    return
                self.lead(lambda: bool(done))
                while done:
                    sequence = done.popleft()
                    inside.discard(sequence)
                    if sequence.error is not None:
                        raise sequence.error
                    yield sequence
        finally:
            self.loop.ahead = 1
            for sequence in list(inside):
                self.cancel(sequence)

    def lead(self, is_done: Callable[[], bool]) -> None:
        """Run turns, or wait while another thread runs them, until `is_done` returns True. It is called after
        each turn. Ctrl-C takes effect between two turns.
        """
        with undisturbed() as pressed:
            while not (is_done() or pressed):
                if self._leads.acquire(blocking=False):
                    try:
                        self._leader = threading.get_ident()
                        with self._threads:
                            while not (is_done() or pressed):
                                self._threads.adapt()
                                self._work()
                    finally:
                        self._leader = None
                        self._leads.release()
                        self._notify()
                else:
                    with self._news:
                        self._news.wait_for(lambda: is_done() or self._leader is None, timeout=_LONGEST_WAIT)

    @contextlib.contextmanager
    def serving(self, after_turn: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Let a thread of its own lead while the context lasts; it calls `after_turn` after each turn."""
        over = threading.Event()

        def is_over() -> bool:
            after_turn()
            return over.is_set()

        thread = threading.Thread(target=self.lead, args=(is_over,), name="longspec", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            self._orders.put(lambda: None)  # wakes the thread
            thread.join()

    def _work(self) -> None:
        """One turn. An error in it ends all sequences, and the engine goes on."""
        with torch.inference_mode(), on_device(self.models.target.device):
            try:
                self._do_orders()
                if self.loop.is_busy:
                    self.loop.turn()
            except Exception as error:
                self.loop.fail(error)
        self._notify()

    def _notify(self) -> None:
        """Let the waiting threads check again."""
        with self._news:
            self._news.notify_all()

    def cancel(self, sequence: Sequence, waits: bool = True) -> None:
        """Stop a sequence, and wait until its slot and pages are free.

        With `waits` False, the thread that leads stops it before its next round.
        """
        if not sequence.submitted_at or sequence.finished:
            return
        self._orders.put(partial(self.loop.cancel, sequence))
        if waits and self._leader != threading.get_ident():
            self.lead(lambda: sequence.finished)

    def main_method(self, sequence: Sequence) -> Method:
        """The method of most of a sequence's rounds; if there were none, the method that was asked for."""
        if sequence.runs:
            ((method, _),) = sequence.methods.most_common(1)
        else:
            method = sequence.method if isinstance(sequence.method, Method) else VANILLA
        return self.loop.fit(method, sequence.draws)

    def check(self) -> None:
        """Raise if another rank is lost, because the engine cannot answer without it."""
        self.device.check()

    def close(self) -> None:
        """End the other ranks, if there are any. The engine cannot be used after that."""
        with self._leads:
            self._end()

    def forget(self) -> None:
        """Drop the KV of all finished texts."""
        self._orders.put(self.scheduler.pool.forget_all)

    @property
    def statistics(self) -> Statistics:
        pool = self.scheduler.pool
        return Statistics(
            self.device.num_captures,
            self.scheduler.num_paused,
            self.loop.num_prompt_tokens,
            self.loop.num_shared_tokens,
            dict(self.loop.num_rounds),
            pool.num_pages,
            pool.num_held,
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[Device]:
        """Give the device to the caller alone; no sequence may be waiting or running. The KV of finished
        texts is dropped, because the caller may overwrite it."""
        with self._leads, torch.inference_mode(), on_device(self.models.target.device):
            self._leader = threading.get_ident()
            self.loop.drain()
            if self.loop.is_busy:
                raise UserError("answers are being written; let them end, or close their streams, first")
            self.scheduler.pool.forget_all()
            try:
                yield self.device
            finally:
                self._leader = None
        self._notify()

    def prepare(self, max_rows: int = 1, methods: Iterable[Method] = ()) -> None:
        """Capture what up to `max_rows` sequences at once will replay, so that none waits for a capture.

        There will be room for the trees of these `methods`: to make it later would drop what is captured.
        """
        if not self.device.captures:
            return
        with self.paused() as device:
            device.reserve_nodes(max((self.loop.fit(one).num_drafted for one in methods), default=0))
            if is_large(self.models.target.config):
                target, config = self.models.target, self.models.target.config
                like = target.norm.weight.new_zeros(1, config.num_heads, config.head_dim)
                target.attention.warm_up(like, config.num_kv_heads, self.max_length)
            num_segments = row_buckets(1 if max_rows == 1 else MOST_SEGMENTS)
            works: list[tuple[Any, ...]] = [
                ("segments", size, sampled) for size in num_segments for sampled in (False, True)
            ]
            for size in [size for size in device.buckets if size <= device.bucket(max_rows)]:
                if self.models.draft is not None:
                    works.append(("ring", size))
                # One sequence mostly keeps the method that is picked first. Many sequences differ in outlook
                # and length, so that any method may be picked.
                contexts = {min(context, self.max_length) for context in CAPTURED_CONTEXTS}
                picked = [self.policy.pick([Outlook(0.0)] * size, None, size, one) for one in contexts]
                for method in {VANILLA, *picked, *(self.policy.methods if max_rows > 1 else ())}:
                    fitted = self.loop.fit(method)
                    works += [(fitted, size, sampled) for sampled in (False, True)]
            device.prepare(works)

    def _do_orders(self) -> None:
        """Do what callers asked for. Without sequences, wait a while for an order."""
        with contextlib.suppress(Empty):
            order = self._orders.get(block=not self.loop.is_busy, timeout=_LONGEST_WAIT)
            while True:
                order()
                order = self._orders.get_nowait()
