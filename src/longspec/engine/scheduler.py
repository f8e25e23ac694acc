"""Which sequences wait, which have a slot, and which pages they hold. Nothing here touches the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from weakref import WeakKeyDictionary

from longspec.cache import PagePool
from longspec.engine.auto import Outlook
from longspec.engine.device import Group
from longspec.engine.sequence import Sequence


@dataclass(eq=False)
class Seat:
    """A sequence that has a slot: its pages, and how much of it is computed."""

    sequence: Sequence
    slot: int
    text: list[int]
    """The tokens whose KV must be there before it can emit: its prompt, and what it said before a pause."""
    pages: list[int]
    hashes: list[bytes]
    """One for each full page of `text`."""
    computed: int
    """Tokens of `text` whose KV is there or is being computed."""
    outlook: Outlook
    group: Group | None
    """Sequences of one group run in the same rounds; None for a guided sequence (`Sequence.is_guided`)."""
    is_sampled: bool
    """Whether choosing its tokens takes more than finding the best score."""
    num_chunked: int
    """The first tokens of the prompt, which are computed in whole chunks of the scheduler's grid."""
    num_in_flight: int = 0
    """The most tokens that its launches in flight may emit."""
    rounds_in_flight: int = 0
    num_unread: int | None = None
    """The most tokens that the draft may not have read yet; None where it has read nothing."""

    @property
    def is_filling(self) -> bool:
        return self.computed < len(self.text)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.sequence.prompt) + len(self.sequence.tokens)

    @property
    def length(self) -> int:
        """The most entries that the pages may hold by now."""
        return min(self.num_tokens - 1 + self.num_in_flight, self.sequence.limit - 1)

    @property
    def ends_soon(self) -> bool:
        """Whether the rounds in flight reach its limit, because each emits at least one token."""
        return self.num_tokens + self.rounds_in_flight >= self.sequence.limit


@dataclass
class _Waiting:
    """What is known of a sequence that waits, so that a turn need not find it again."""

    text: list[int]
    hashes: list[bytes]
    promised: bytes | None = None
    """The page that it waits for, which another sequence computes."""


@dataclass
class Scheduler:
    """The waiting line, the seats and the pages."""

    pool: PagePool
    max_rows: int
    grid: int = 0
    """If not 0, the bits of a prompt's KV depend on how it is cut. Then it is always cut into chunks of this
    many tokens and a rest, and pages are shared only by texts that are cut in the same way."""
    waiting: deque[Sequence] = field(default_factory=deque)
    seats: dict[int, Seat] = field(default_factory=dict)
    """By slot; in the order of admission."""
    num_paused: int = 0
    """How often a sequence had to give its pages to an older one."""
    free: list[int] = field(init=False)
    """Slots without a sequence; a heap."""
    _waiting: WeakKeyDictionary[Sequence, _Waiting] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        self.free = list(range(self.max_rows))

    @property
    def filling(self) -> list[Seat]:
        """The seats whose prompts are being computed."""
        return [seat for seat in self.seats.values() if seat.is_filling]

    @property
    def running(self) -> list[Seat]:
        """The seats that emit tokens."""
        return [seat for seat in self.seats.values() if not seat.is_filling]

    @property
    def num_rows(self) -> int:
        """Slots up to the last one that is taken."""
        return max(self.seats, default=-1) + 1

    def has(self, seat: Seat) -> bool:
        """Whether the sequence still has this seat: it may have ended or been paused."""
        return self.seats.get(seat.slot) is seat

    def row_mask(self, seats: list[Seat]) -> list[bool]:
        """For each row up to the last one that is taken, whether it belongs to one of these seats."""
        slots = {seat.slot for seat in seats}
        return [slot in slots for slot in range(self.num_rows)]

    def admit(self) -> list[Seat]:
        """Give slots and pages to the waiting sequences, in order, while there are any left."""
        admitted: list[Seat] = []
        later: list[Sequence] = []
        while self.waiting and len(self.seats) < self.max_rows:
            sequence = self.waiting.popleft()
            known = self._known(sequence)
            text, hashes = known.text, known.hashes
            if known.promised is not None and self.pool.is_promised(known.promised):
                later.append(sequence)
                continue
            # At least one token is left to compute, because its logits are needed, and a shared page is never
            # written.
            useful = hashes[: (len(text) - 1) // self.pool.size]
            shared = self._share(sequence, useful)
            following = useful[len(shared) : len(shared) + 1]
            if following and self.pool.is_promised(following[0]):
                # Another sequence computes the same page now: wait for it instead of computing it twice.
                self.pool.release(shared)
                known.promised = following[0]
                later.append(sequence)
                continue
            needed = -(-(len(text) + 1) // self.pool.size) - len(shared)
            # A paused sequence waits until there is room for what it lacked, or it would be paused again.
            wanted = -(-sequence.num_wanted // self.pool.size) - len(shared) if self.seats else 0
            own = None
            if wanted <= self.pool.num_available:
                own = self.pool.take(needed, shared[-1] if shared else None)
            if own is None:
                self.pool.release(shared)
                self.waiting.appendleft(sequence)
                break
            del self._waiting[sequence]
            admitted.append(self._seat(sequence, text, hashes, shared, own))
        self.waiting.extendleft(reversed(later))
        return admitted

    def _known(self, sequence: Sequence) -> _Waiting:
        known = self._waiting.get(sequence)
        # Only a pause comes after its text has grown.
        if known is None or len(known.text) != len(sequence.prompt) + len(sequence.tokens):
            known = self._waiting[sequence] = _Waiting(sequence.text, self._hashes(sequence))
        return known

    def _seat(
        self, sequence: Sequence, text: list[int], hashes: list[bytes], shared: list[int], own: list[int]
    ) -> Seat:
        slot = heappop(self.free)
        computed = len(shared) * self.pool.size
        if not sequence.was_paused:
            sequence.num_shared = computed
        outlook = Outlook(sequence.sampling.temperature)
        group = None if sequence.is_guided else (sequence.method, sequence.draws)
        is_sampled = not sequence.sampling.greedy or sequence.sampling.repetition_penalty != 1
        seat = Seat(
            sequence,
            slot,
            text,
            [*shared, *own],
            hashes,
            computed,
            outlook,
            group,
            is_sampled,
            self._num_chunked(sequence),
        )
        self.pool.promise(hashes[len(shared) :])
        self.seats[slot] = seat
        return seat

    def _num_chunked(self, sequence: Sequence) -> int:
        # Only of the prompt: after a pause, the answer's KV must have the bits that rounds gave it.
        return len(sequence.prompt) // self.grid * self.grid if self.grid else 0

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        """The hashes of a sequence's text so far."""
        return self.pool.hashes(sequence.text, self._num_chunked(sequence) if self.grid else None)

    def _share(self, sequence: Sequence, hashes: list[bytes]) -> list[int]:
        """The pages with these hashes, as far as there are any; of a chunk all or none."""
        pages = self.pool.share(hashes)
        num_tokens = len(pages) * self.pool.size
        if num_tokens >= self._num_chunked(sequence):
            return pages
        whole = num_tokens // self.grid * self.grid // self.pool.size
        self.pool.release(pages[whole:])
        return pages[:whole]

    def note_computed(self, seat: Seat, count: int) -> None:
        """Note that the next `count` tokens of a prompt are being computed. Sequences that are admitted later
        may share their full pages, because their work runs later."""
        size = self.pool.size
        before, seat.computed = seat.computed // size, seat.computed + count
        after = seat.computed // size
        self.pool.withdraw(seat.hashes[before:after])
        self.pool.remember(seat.pages[:after], seat.hashes[:after])

    def grow(self, seat: Seat, num_entries: int) -> list[int] | None:
        """Give a seat pages for so many entries; returns the new pages, or None if there are too few."""
        lacking = -(-num_entries // self.pool.size) - len(seat.pages)
        if lacking <= 0:
            return []
        pages = self.pool.take(lacking, seat.pages[-1])
        if pages is not None:
            seat.pages += pages
        return pages

    def release(self, seat: Seat) -> None:
        """Free the slot and the pages. Full pages stay findable by their hash until others need them."""
        size = self.pool.size
        self.pool.withdraw(seat.hashes[seat.computed // size :])
        # The newest token may have no KV yet.
        known = seat.computed if seat.is_filling else seat.num_tokens - 1
        hashes = seat.hashes if seat.is_filling else self._hashes(seat.sequence)
        self.pool.remember(seat.pages[: known // size], hashes)
        self.pool.release(seat.pages)
        del self.seats[seat.slot]
        heappush(self.free, seat.slot)

    def pause(self, seat: Seat, num_wanted: int) -> None:
        """Send a sequence back to the head of the waiting line. It is computed again when there is room for
        `num_wanted` entries."""
        self.release(seat)
        seat.sequence.num_wanted = num_wanted
        self.waiting.appendleft(seat.sequence)
        self.num_paused += 1

    def compact(self, num_rows: int) -> Iterator[tuple[int, int]]:
        """Move sequences to lower slots until the first `num_rows` hold all of them. Yields the old and the
        new slot of each."""
        while len(self.seats) <= num_rows < self.num_rows:
            seat = self.seats[self.num_rows - 1]
            source, seat.slot = seat.slot, heapreplace(self.free, seat.slot)
            self.seats = {one.slot: one for one in self.seats.values()}
            yield source, seat.slot
