"""The one engine that everything runs on: sequences join and leave at any turn of its loop.

Whoever waits for an answer leads: it runs turns for all sequences (see `longspec.engine.loop`). Another
thread takes over when the leader has what it waited for.
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
from longspec.engine.costs import Costs
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

# Seconds after which who waits looks again by itself.
_LONGEST_WAIT = 0.2


@dataclass(frozen=True)
class Statistics:
    """What an engine has done so far."""

    num_captures: int
    num_paused: int
    """How often a sequence gave its pages to an older one, to be computed again later."""
    prompt_tokens: int
    shared_tokens: int
    """Of these, tokens whose KV was there already."""
    rounds: Mapping[str, int]
    num_pages: int
    held_pages: int


class Engine:
    """A target, its draft, and all the sequences that they answer.

    All of this may be called from any thread. What a sequence says does not depend on who runs beside it.
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
            """What is worth measuring for `auto`."""
            # Room for the trees of `auto` and of the default.
            num_nodes = max(one.num_drafted for one in (Tree(), *self.candidates))
            if ranks is not None:
                ranks.tell(Open(size, num_nodes, exact))
                self._end = weakref.finalize(self, ranks.close)
            self.device = make_device(target, draft, head, size, num_nodes, exact)
        self.device.ranks = ranks
        self.models = self.device.models
        self.scheduler = Scheduler(PagePool(size.num_pages, size.page_size), size.max_rows)
        policy = Policy(unmeasured(draft), acceptance or {}, Costs({}, ()))
        self.loop = Loop(self.device, self.scheduler, policy, self.candidates)
        self._known_choices: dict[MethodChoice, MethodChoice] = {}
        self._orders: SimpleQueue[Callable[[], object]] = SimpleQueue()
        """What other threads ask of the one that leads."""
        self._leads = threading.Lock()
        self._leader: int | None = None
        self._news = threading.Condition()
        # Ranks share the processors by themselves.
        self._threads = FreeThreads(target.device.type == "cpu" and ranks is None)

    @property
    def policy(self) -> Policy:
        return self.loop.policy

    def adopt(self, costs: Costs) -> None:
        """Decide by these from now on."""
        self.loop.policy = Policy(self.candidates, self.policy.acceptance, costs)

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences into the line; they are answered while anyone leads (`run`, `lead`, `serving`)."""
        asked = list(sequences)
        for sequence in asked:
            self._check(sequence)
        for sequence in asked:
            # One object for equal methods, so that rounds are grouped without comparing them.
            sequence.method = self._known_choices.setdefault(sequence.method, sequence.method)
            sequence.submitted_at = time.perf_counter()
            self._orders.put(partial(self.scheduler.waiting.append, sequence))

    def _check(self, sequence: Sequence) -> None:
        """Refuse what can never be answered."""
        pool = self.scheduler.pool
        most = min(self.max_length, pool.num_pages * pool.size)
        if sequence.limit > most:
            raise UserError(f"a sequence of {sequence.limit} tokens exceeds the engine's {most}")
        if isinstance(sequence.method, Method):
            self.loop.fit(sequence.method, sequence.draws)  # refuses what cannot run

    def run(self, sequences: list[Sequence]) -> None:
        """Answer these; what goes wrong is raised."""
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
        """Answer sequences; yields each when it is done.

        Of vanilla, `ahead` rounds are launched before the host looks at them: with many rows it could not
        keep up otherwise. Rows end on the device by themselves, and whoever waits does so for as many rounds.

        They are taken from the iterable when there is room for them. If nobody else uses the engine, who runs
        beside whom follows from the sequences alone and never from time: a second run computes the same bits,
        and processes that share a target's weights launch the same work in the same order. The caller's work
        on what is yielded overlaps with the GPU's on what comes next.
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
        """Run turns, or wait while another thread does, until `is_done`, which is asked after each turn.

        Ctrl-C takes effect between two turns.
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
                        self._tell()
                else:
                    with self._news:
                        self._news.wait_for(lambda: is_done() or self._leader is None, timeout=_LONGEST_WAIT)

    @contextlib.contextmanager
    def serving(self, after_turn: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Have a thread lead, whoever else does, for as long as the context lasts; it calls `after_turn`."""
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
            self._orders.put(lambda: None)  # so that it looks
            thread.join()

    def _work(self) -> None:
        """One turn; an error in it ends every sequence, not the engine."""
        with torch.inference_mode(), on_device(self.models.target.device):
            try:
                if self._take_orders():
                    self.loop.turn()
            except Exception as error:
                self.loop.fail(error)
        self._tell()

    def _tell(self) -> None:
        """Have those who wait look again."""
        with self._news:
            self._news.notify_all()

    def cancel(self, sequence: Sequence, waits: bool = True) -> None:
        """Stop a sequence and wait until it is; its slot and pages are free then.

        Who may not wait leaves that to the thread that leads: the sequence ends before its next round.
        """
        if not sequence.submitted_at or sequence.finished:
            return
        self._orders.put(partial(self.loop.cancel, sequence))
        if waits and self._leader != threading.get_ident():
            self.lead(lambda: sequence.finished)

    def main_method(self, sequence: Sequence) -> Method:
        """What most of a sequence's rounds ran, or would have run."""
        if sequence.runs:
            ((method, _),) = sequence.methods.most_common(1)
        else:
            method = sequence.method if isinstance(sequence.method, Method) else VANILLA
        return self.loop.fit(method, sequence.draws)

    def check(self) -> None:
        """Raise if this engine is of no use any more, because another rank is lost."""
        self.device.check()

    def close(self) -> None:
        """End the other ranks, if there are any; then this one is of no use either."""
        with self._leads:
            self._end()

    def forget(self) -> None:
        """Let go of all texts that no sequence holds."""
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
        """The device for the caller alone; no sequence may be there."""
        with self._leads, torch.inference_mode(), on_device(self.models.target.device):
            self._leader = threading.get_ident()
            self.loop.drain()
            assert not self.loop.is_busy, "sequences are being answered"
            try:
                yield self.device
            finally:
                self._leader = None
        self._tell()

    def prepare(self, max_rows: int = 1) -> None:
        """Record what a first sequence, or so many at once, will replay, so that none has to wait for it."""
        if not self.device.captures:
            return
        with self.paused() as device:
            if self.loop.chunks.is_large:
                target, config = self.models.target, self.models.target.config
                like = target.norm.weight.new_zeros(1, config.num_heads, config.head_dim)
                target.attention.warm_up(like, config.num_kv_heads, self.max_length)
            most = 1 if max_rows == 1 else MOST_SEGMENTS
            works: list[tuple[Any, ...]] = [
                ("segments", size, sampled)
                for size in row_buckets(MOST_SEGMENTS)
                if size <= most
                for sampled in (False, True)
            ]
            for size in [size for size in device.buckets if size <= device.bucket(max_rows)]:
                picked = self.policy.pick([Outlook(0.0)] * size, None, size, 512)
                if self.models.draft is not None:
                    works.append(("ring", size))
                # One sequence mostly stays with what is picked first; of many, outlooks and lengths differ.
                for method in {VANILLA, picked, *(self.policy.methods if max_rows > 1 else ())}:
                    fitted = self.loop.fit(method)
                    works += [(fitted, size, sampled) for sampled in (False, True)]
            device.prepare(works)

    def _take_orders(self) -> bool:
        """Do what callers asked for; whether there is something to do now."""
        with contextlib.suppress(Empty):
            order = self._orders.get(block=not self.loop.is_busy, timeout=_LONGEST_WAIT)
            while True:
                order()
                order = self._orders.get_nowait()
        return self.loop.is_busy
