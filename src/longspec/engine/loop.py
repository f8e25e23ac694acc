"""What one turn of the engine does: admit, compute a chunk of prompts, run rounds, read what they emitted."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from longspec.decoding.methods import MOST_NODES, VANILLA, Auto, Lookup, Method
from longspec.engine.auto import MethodFitter, Policy
from longspec.engine.captures import Captures
from longspec.engine.chunks import Chunks
from longspec.engine.device import Device, Group
from longspec.engine.scheduler import Scheduler, Seat
from longspec.engine.sequence import Sequence
from longspec.engine.transfer import Report
from longspec.errors import BrokenTarget, UserError

# Launches that the host may have queued before it reads the first of them.
IN_FLIGHT = 2


@dataclass
class _Launch:
    """Work that was queued on the device, and the sequences that it is for."""

    reports: list[Report]
    """One for each round. Only vanilla rounds are launched several at a time."""
    seats: list[tuple[int, Seat]]
    """Each sequence that will be told, with its row in the reports."""
    method: Method | None = None
    """The method of the round; None for prompts."""
    width: int = 1
    """The most tokens that each row may emit."""
    runs: list[int] | None = None
    """For each of `seats`, how many of its last tokens occurred before; None if the host does not know."""
    is_auto: bool = False
    scores: Report | None = None
    """The log-probabilities of a guided round."""

    @property
    def num_rounds(self) -> int:
        return 0 if self.method is None else len(self.reports)


class Loop:
    """The sequences that are being answered, turn by turn. One thread at a time may use it."""

    def __init__(
        self, device: Device, scheduler: Scheduler, policy: Policy, candidates: tuple[Method, ...]
    ) -> None:
        self.device, self.models, self.scheduler = device, device.models, scheduler
        self.policy, self.chunks = policy, Chunks(device.models)
        self.runs_ahead = self.models.target.device.type == "cuda"
        """Whether the device computes while the host goes on."""
        self.ahead = 1
        """Vanilla rounds that are launched before the host looks at the first of them."""
        self.num_prompt_tokens, self.num_shared_tokens = 0, 0
        self.num_rounds: Counter[str] = Counter()
        self.fit = MethodFitter(device.models, candidates)
        self._captures = Captures(device, self.fit)
        self._flight: deque[_Launch] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self.scheduler.seats or self.scheduler.waiting or self._flight)

    def drain(self) -> None:
        """Read everything that was launched."""
        while self._flight:
            self._read()

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence, and free its slot and pages."""
        if sequence.finished:
            return
        with contextlib.suppress(ValueError):
            self.scheduler.waiting.remove(sequence)
        for seat in list(self.scheduler.seats.values()):
            if seat.sequence is sequence:
                self._release(seat)
        sequence.finish("closed")

    def fail(self, error: BaseException) -> None:
        """End every sequence with the error; the engine itself can go on."""
        sequences = [*(seat.sequence for seat in self.scheduler.seats.values()), *self.scheduler.waiting]
        self._flight.clear()
        self.scheduler.waiting.clear()
        for seat in list(self.scheduler.seats.values()):
            self.scheduler.release(seat)
        # What the pages hold may be half written.
        self.scheduler.pool.forget_all()
        with contextlib.suppress(Exception):
            self.device.release(range(self.device.max_rows))
        for sequence in sequences:
            sequence.finish("closed", error)

    def turn(self) -> None:
        """Launch what comes next, and read what is there."""
        self._admit()
        # One pass over prompts for each round, because sequences would otherwise leave faster than they come.
        launched = False
        for _ in range(self.ahead):
            launched |= self._launch_prompts()
        if not self.runs_ahead:
            # The first tokens are there already. Read them now, because a round takes time, and that time
            # must not count as the prompt's.
            self.drain()
        for group, seats in self._groups():
            launched |= self._launch_guided(seats) if group is None else self._launch_round(group, seats)
        in_flight = IN_FLIGHT if launched and self.runs_ahead else 0
        while len(self._flight) > in_flight:
            self._read()

    def _admit(self) -> None:
        seats = self.scheduler.admit()
        if not seats:
            return
        for seat in seats:
            if not seat.sequence.was_paused:
                self.num_prompt_tokens += len(seat.text)
                self.num_shared_tokens += seat.computed
            self._reserve(seat.sequence)
        self._learn_words((token for seat in seats for token in reversed(seat.text)), seats)
        self.device.admit(
            [seat.slot for seat in seats],
            [seat.text for seat in seats],
            [seat.pages for seat in seats],
            [seat.sequence.limit for seat in seats],
            [seat.sequence.seed for seat in seats],
            [seat.sequence.sampling for seat in seats],
            [seat.sequence.eos_ids for seat in seats],
        )

    def _reserve(self, sequence: Sequence) -> None:
        """Make room in the draft's ring for trees that are larger than the default ones."""
        if not isinstance(sequence.method, Method):
            return
        if self.device.reserve_nodes(self.fit(sequence.method, sequence.draws).num_drafted):
            for seat in self.scheduler.seats.values():
                seat.num_unread = None

    def _learn_words(self, tokens: Iterable[int], admitted: list[Seat] | None = None) -> None:
        """Let the draft propose tokens of the texts that its own vocabulary does not have.

        Only in plain rounds, because a larger head changes shapes, and captured rounds have fixed ones.
        """
        if self.models.fused or self.models.head is None:
            return
        forgets = admitted is not None and len(admitted) == len(self.scheduler.seats)
        # The newest tokens come first: they are the likeliest, and there may not be room for all.
        self.device.learn_words(list(dict.fromkeys(tokens)), forgets)

    def _launch_prompts(self) -> bool:
        filling = self.scheduler.filling
        if not filling:
            return False
        parts = self.chunks.parts(filling, alone=not self.scheduler.running)
        sampled = any(seat.is_sampled for seat, _ in parts)
        report = self.device.take([part for _, part in parts], sampled)
        for seat, part in parts:
            self.scheduler.note_computed(seat, part.count)
        complete = [(row, seat) for row, (seat, part) in enumerate(parts) if part.is_end]
        guided = [seat for _, seat in complete if seat.sequence.is_guided]
        if guided:
            # A guided round also chooses their first tokens.
            self.device.rewind([seat.slot for seat in guided], [seat.text for seat in guided])
        self._queue(_Launch([report], [one for one in complete if not one[1].sequence.is_guided]))
        return True

    def _queue(self, launch: _Launch) -> None:
        """Note a launch; `_read` takes it up later."""
        self._flight.append(launch)
        width, num_rounds = launch.width, launch.num_rounds
        for _, seat in launch.seats:
            seat.num_in_flight += width
            seat.rounds_in_flight += num_rounds

    def _groups(self) -> list[tuple[Group | None, list[Seat]]]:
        """The sequences that emit tokens, grouped by the round that they can share."""
        groups: dict[tuple[int, bool] | None, list[Seat]] = {}
        for seat in self.scheduler.running:
            # `Engine.submit` made equal choices one object, so that comparing them is cheap.
            key = None if seat.group is None else (id(seat.group[0]), seat.group[1])
            groups.setdefault(key, []).append(seat)
        return [(seats[0].group, seats) for seats in groups.values()]

    def _launch_guided(self, guided: list[Seat]) -> bool:
        """One round of the sequences that return probabilities or have a constraint."""
        while any(seat.rounds_in_flight for seat in guided):
            self._read()  # the next masks depend on the tokens so far
        guided = [seat for seat in guided if self.scheduler.has(seat)]
        if not guided or not self._have_pages(guided, 1):
            return bool(guided)
        self._compact()
        masks = self._masks(guided)
        guided = [seat for seat in guided if not seat.sequence.finished]
        if not guided:
            return True
        sampled = any(seat.is_sampled for seat in guided)
        num_top = max(seat.sequence.num_logprobs or 0 for seat in guided)
        active = self.scheduler.row_mask(guided)
        report, scores = self.device.guided_round(active, sampled, masks, num_top)
        self._queue(_Launch([report], [(seat.slot, seat) for seat in guided], VANILLA, scores=scores))
        return True

    def _masks(self, seats: list[Seat]) -> torch.Tensor | None:
        """The tokens that the constraints allow, int32 [rows, V / 32]. A constraint that fails ends its
        sequence."""
        constrained = [seat for seat in seats if seat.sequence.constraint is not None]
        if not constrained:
            return None
        size = -(-self.models.target.config.vocab_size // 32)
        # -1 sets all bits, because a row without a constraint may emit every token.
        masks = torch.full((self.device.max_rows, size), -1, dtype=torch.int32, device="cpu")
        for seat in constrained:
            assert seat.sequence.constraint is not None
            masks[seat.slot] = 0
            try:
                seat.sequence.constraint.fill(masks[seat.slot], seat.sequence.tokens)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic in llguidance's Rust code is no Exception
                self._end(seat, error)
        return masks

    def _launch_round(self, group: Group, seats: list[Seat]) -> bool:
        seats = [seat for seat in seats if self.scheduler.has(seat)]
        if all(seat.ends_soon for seat in seats):
            return False
        self._compact()
        choice, draws = group
        sampled = any(seat.is_sampled for seat in self.scheduler.running)
        runs = None
        if is_auto := isinstance(choice, Auto):
            choice, runs = self._pick(choice, seats, draws, sampled)
        assert isinstance(choice, Method)
        method = self.fit(choice, draws)
        num_rounds = self.ahead if method.num_nodes == 1 else 1
        width = num_rounds * (method.depth + 1)
        if not self._have_pages(seats, method.num_nodes - 1 + num_rounds):
            return True  # sequences ended or were paused to make room: the next turn groups the rest
        if self.models.fused and method.uses_draft:
            self._read_into_rings(seats, method.width)
        num_rows, active = self.scheduler.num_rows, self.scheduler.row_mask(seats)
        reports = [self.device.round(method, num_rows, active, sampled) for _ in range(num_rounds)]
        rows = [(seat.slot, seat) for seat in seats]
        self._queue(_Launch(reports, rows, choice, width, runs, is_auto))
        for seat in seats:
            if method.uses_draft:
                seat.num_unread = width
            elif seat.num_unread is not None:
                seat.num_unread += width
        return True

    def _pick(
        self, auto: Auto, seats: list[Seat], draws: bool, sampled: bool
    ) -> tuple[Method, list[int] | None]:
        """Pick the method for these rows in this turn. Also returns how many of each row's last tokens
        occurred before, or None if the host does not know that."""
        runs = None
        if not self.models.fused and any(one.source == "lookup" for one in self.policy.methods):
            found = Lookup().find(self.device.rows(self.scheduler.num_rows))[0].tolist()
            runs = [found[seat.slot] for seat in seats]
        context = sum(seat.length for seat in seats) // len(seats)
        num_rows = self.device.bucket(self.scheduler.num_rows)
        outlooks = [seat.outlook for seat in seats]
        rows = (outlooks, runs, num_rows, context)
        if not self.device.captures:
            return self.policy.pick(*rows, auto.max_nodes), runs
        num_left = max(1, *(seat.sequence.limit - seat.num_tokens for seat in seats))
        return self._captures.pick(self.policy, rows, auto.max_nodes, draws, sampled, num_left), runs

    def _have_pages(self, seats: list[Seat], num_entries: int) -> bool:
        """Give every row the pages that a round needs; False if that ended or paused sequences."""
        size, grown = self.scheduler.pool.size, list[tuple[int, int, list[int]]]()
        lacking: Seat | None = None
        for seat in seats:
            before = len(seat.pages)
            if seat.length + num_entries <= before * size:
                continue
            pages = self._grow(seat, num_entries)
            if pages is None:
                lacking = seat
                break
            if pages:
                grown.append((seat.slot, before, pages))
        if grown:
            self.device.extend(*zip(*grown, strict=True))
        if lacking is not None:
            self._make_room(lacking, num_entries)
        return lacking is None

    def _grow(self, seat: Seat, num_entries: int) -> list[int] | None:
        """Take pages for so many new entries; returns them, or None if there are too few."""
        # What a round writes behind the text's limit goes to the dump page.
        return self.scheduler.grow(seat, min(seat.length + num_entries, seat.sequence.limit + MOST_NODES))

    def _make_room(self, seat: Seat, num_entries: int) -> None:
        """Pause the youngest sequences. First read all launches, because one of them may have ended a
        sequence."""
        self.drain()
        # Take the freed pages at once: otherwise the paused sequence would get them back.
        while self.scheduler.has(seat):
            before = len(seat.pages)
            pages = self._grow(seat, num_entries)
            if pages is not None:
                if pages:
                    self.device.extend([seat.slot], [before], [pages])
                return
            youngest = list(self.scheduler.seats.values())[-1]
            if youngest is seat and len(self.scheduler.seats) == 1:
                self._refuse(seat)
                return
            self.device.release([youngest.slot])
            wanted = youngest.length + (num_entries if youngest is seat else 1)
            self.scheduler.pause(youngest, min(wanted, youngest.sequence.limit + MOST_NODES))

    def _refuse(self, seat: Seat) -> None:
        """End a sequence that needs more pages than there are."""
        size = self.scheduler.pool.num_pages * self.scheduler.pool.size
        message = f"the KV memory of {size} tokens is too small for a text of {seat.length} tokens and a tree"
        self._end(seat, UserError(f"{message}; give more (kv_memory)"))

    def _read_into_rings(self, seats: list[Seat], width: int) -> None:
        """Let the draft read the texts of rows with more unread tokens than its first pass takes in."""
        behind = [seat for seat in seats if seat.num_unread is None or seat.num_unread > width]
        if behind:
            self.device.read_into_rings([seat.slot for seat in behind])

    def _compact(self) -> None:
        """Move rows to the front where that makes rounds smaller."""
        for source, goal in self.scheduler.compact(self.device.bucket(max(1, len(self.scheduler.seats)))):
            self.device.move(source, goal)

    def _read(self) -> None:
        """Give the oldest launch's tokens to its sequences, and release those that have ended."""
        launch = self._flight.popleft()
        reports = [report.read() for report in launch.reports]
        scores = None if launch.scores is None else launch.scores.read()
        self.device.check()
        width, num_rounds = launch.width, launch.num_rounds
        for index, (row, seat) in enumerate(launch.seats):
            seat.num_in_flight -= width
            seat.rounds_in_flight -= num_rounds
            emitted = _emitted(launch, reports, row)
            if not emitted or seat.sequence.finished:
                continue
            if -1 in emitted:
                self._end(seat, _overflow(self.models.target.dtype))
                continue
            if scores is not None:
                seat.sequence.keep_scores(scores[row])
            try:
                self._keep(seat, emitted, launch, None if launch.runs is None else launch.runs[index])
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic in the Rust tokenizers is no Exception
                self._end(seat, error)
        done = [seat for _, seat in launch.seats if seat.sequence.finished and self.scheduler.has(seat)]
        if done:
            self._release(*done)

    def _keep(self, seat: Seat, emitted: list[int], launch: _Launch, run: int | None) -> None:
        sequence = seat.sequence
        if launch.method is None:
            sequence.keep_first(emitted[0])
        elif len(launch.reports) > 1:
            sequence.keep_vanilla(emitted, launch.method)
            self.num_rounds[launch.method.name] += len(emitted)
        else:
            sequence.keep_round(emitted, launch.method)
            self.num_rounds[launch.method.name] += 1
            if launch.is_auto:
                self.policy.learn(seat.outlook, launch.method, len(emitted), run)
        self._learn_words(emitted)

    def _end(self, seat: Seat, error: BaseException) -> None:
        """End one sequence with an error."""
        self._release(seat)
        seat.sequence.finish("closed", error)

    def _release(self, *seats: Seat) -> None:
        self.device.release([seat.slot for seat in seats])
        for seat in seats:
            self.scheduler.release(seat)


def _emitted(launch: _Launch, reports: list[Any], row: int) -> list[int]:
    """The tokens that a row emitted. A prompt's report is a token for each row; a round's is, for each row,
    the number of tokens and then the tokens."""
    if launch.method is None:
        return [reports[0][row]]
    if len(reports) > 1:  # vanilla rounds: at most one token each
        return [report[row][1] for report in reports if report[row][0]]
    tokens: list[int] = reports[0][row][1 : 1 + reports[0][row][0]]
    return tokens


def _overflow(dtype: torch.dtype) -> BrokenTarget:
    name = str(dtype).removeprefix("torch.")
    return BrokenTarget(
        f"the target's scores are not finite: its numbers overflow {name}, or its weights are damaged; take "
        "another dtype, bfloat16 or float32, or fetch the weights again"
    )
