"""What one turn of the engine does: admit, compute a chunk of prompts, run rounds, read what they emitted."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from longspec.decoding.methods import MOST_NODES, VANILLA, Auto, Lookup, Method
from longspec.engine.auto import Policy
from longspec.engine.chunks import Chunks
from longspec.engine.costs import draft_width
from longspec.engine.device import Device, Group
from longspec.engine.scheduler import Scheduler, Seat
from longspec.engine.sequence import Sequence
from longspec.engine.transfer import Report
from longspec.errors import UserError

# Launches that may be on their way before the host has read the first of them.
IN_FLIGHT = 2


@dataclass
class _Launch:
    """Something on its way, and whom it is for."""

    reports: list[Report]
    """One for each round; there are several only of vanilla."""
    seats: list[tuple[int, Seat, bool | None]]
    """Rows of the reports, whose they are, and whether there was something to look up."""
    method: Method | None
    """Of the round; None for prompts."""
    width: int = 0
    """The most tokens that each row may emit."""
    is_auto: bool = False
    scores: Report | None = None
    """What a round of guided sequences tells beside the tokens."""


class Loop:
    """The sequences that are being answered, turn by turn. One thread at a time may use it."""

    def __init__(
        self, device: Device, scheduler: Scheduler, policy: Policy, candidates: tuple[Method, ...]
    ) -> None:
        self.device, self.models, self.scheduler = device, device.models, scheduler
        self.policy, self.chunks = policy, Chunks(device.models)
        self.ahead = 1
        """Vanilla rounds that are launched before the host looks at the first of them."""
        self.num_prompt_tokens, self.num_shared_tokens = 0, 0
        self.num_rounds: Counter[str] = Counter()
        self._candidates = candidates
        self._fitted: dict[tuple[Method, bool], Method] = {}
        self._flight: deque[_Launch] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self.scheduler.seats or self.scheduler.waiting or self._flight)

    def fit(self, method: Method, draws: bool = False) -> Method:
        if (method, draws) not in self._fitted:
            width = draft_width(self._candidates, self.models) if method in self._candidates else 0
            fitted = method.fit(self.models, draws, width)
            if self.models.exact:
                _check_exact(fitted)
            self._fitted[method, draws] = fitted
        return self._fitted[method, draws]

    def drain(self) -> None:
        while self._flight:
            self._read()

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence; its slot and pages are free then."""
        if sequence.finished:
            return
        if sequence in self.scheduler.waiting:
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
        # As many passes over prompts as rounds: those who come must not be fewer than those who leave.
        launched = False
        for _ in range(self.ahead):
            launched |= self._launch_prompts()
        for group, seats in self._groups():
            launched |= self._launch_guided(seats) if group is None else self._launch_round(group, seats)
        in_flight = IN_FLIGHT if launched and self.models.target.device.type == "cuda" else 0
        while len(self._flight) > in_flight:
            self._read()

    def _admit(self) -> None:
        seats = self.scheduler.admit()
        if not seats:
            return
        for seat in seats:
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
        """Make room for trees that are larger than the default ones."""
        if not isinstance(sequence.method, Method):
            return
        if self.device.reserve_nodes(self.fit(sequence.method, sequence.draws).num_drafted):
            for seat in self.scheduler.seats.values():
                seat.num_unread = None

    def _learn_words(self, tokens: Iterable[int], admitted: list[Seat] | None = None) -> None:
        """Let the draft propose the texts' own words, in its vocabulary or not, where shapes may change."""
        if self.models.fused or self.models.head is None:
            return
        is_anew = admitted is not None and len(admitted) == len(self.scheduler.seats)
        # What was said last comes first: should there be no room for all, it is the likelier.
        self.device.learn_words(list(dict.fromkeys(tokens)), is_anew)

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
            # Their first tokens are chosen by a guided round as well.
            self.device.rewind([seat.slot for seat in guided], [seat.text for seat in guided])
        ends: list[tuple[int, Seat, bool | None]] = [
            (row, seat, None) for row, seat in complete if not seat.sequence.is_guided
        ]
        self._flight.append(_Launch([report], ends, None))
        for _, seat, _ in ends:
            seat.num_in_flight += 1
        return True

    def _groups(self) -> list[tuple[Group | None, list[Seat]]]:
        """The sequences that emit tokens, by what they share."""
        groups: dict[tuple[int, bool] | None, list[Seat]] = {}
        for seat in self.scheduler.running:
            # Equal choices are one object, so that nothing is compared here.
            key = None if seat.group is None else (id(seat.group[0]), seat.group[1])
            groups.setdefault(key, []).append(seat)
        return [(seats[0].group, seats) for seats in groups.values()]

    def _launch_guided(self, guided: list[Seat]) -> bool:
        """One round of the sequences that tell probabilities or have a constraint."""
        while any(seat.rounds_in_flight for seat in guided):
            self._read()  # the next masks depend on what was said
        guided = [seat for seat in guided if self.scheduler.seats.get(seat.slot) is seat]
        if not guided or not self._have_pages(guided, 1):
            return bool(guided)
        self._compact()
        masks = self._masks(guided)
        guided = [seat for seat in guided if not seat.sequence.finished]
        if not guided:
            return True
        sampled = any(seat.is_sampled for seat in guided)
        num_top = max(seat.sequence.num_logprobs or 0 for seat in guided)
        report, scores = self.device.guided_round(self._active(guided), sampled, masks, num_top)
        seats: list[tuple[int, Seat, bool | None]] = [(seat.slot, seat, None) for seat in guided]
        self._flight.append(_Launch([report], seats, VANILLA, 1, scores=scores))
        for seat in guided:
            seat.num_in_flight += 1
            seat.rounds_in_flight += 1
        return True

    def _masks(self, seats: list[Seat]) -> torch.Tensor | None:
        """What the constraints of these allow, int32 [rows, V / 32]; one that fails ends its sequence."""
        constrained = [seat for seat in seats if seat.sequence.constraint is not None]
        if not constrained:
            return None
        size = -(-self.models.target.config.vocab_size // 32)
        masks = torch.full((self.device.max_rows, size), -1, dtype=torch.int32)
        for seat in constrained:
            assert seat.sequence.constraint is not None
            try:
                seat.sequence.constraint.fill(masks[seat.slot], seat.sequence.tokens)
            except Exception as error:
                self._end(seat, error)
        return masks

    def _launch_round(self, group: Group, seats: list[Seat]) -> bool:
        seats = [seat for seat in seats if self.scheduler.seats.get(seat.slot) is seat]
        if all(self._ends_soon(seat) for seat in seats):
            return False
        self._compact()
        choice, draws = group
        matches = None
        if is_auto := isinstance(choice, Auto):
            choice, matches = self._pick(choice, seats)
        assert isinstance(choice, Method)
        method = self.fit(choice, draws)
        num_rounds = self.ahead if method.num_nodes == 1 else 1
        width = num_rounds * (method.depth + 1)
        if not self._have_pages(seats, method.num_nodes - 1 + num_rounds):
            return True  # some were read or paused to make room: the next turn sees who is left
        if self.models.fused and method.uses_draft:
            self._read_into_rings(seats, method.width)
        num_rows, active = self.scheduler.num_rows, self._active(seats)
        sampled = any(seat.is_sampled for seat in self.scheduler.running)
        reports = [self.device.round(method, num_rows, active, sampled) for _ in range(num_rounds)]
        found = [(s.slot, s, None if matches is None else matches[i]) for i, s in enumerate(seats)]
        self._flight.append(_Launch(reports, found, choice, width, is_auto))
        for seat in seats:
            seat.num_in_flight += width
            seat.rounds_in_flight += num_rounds
            unread = seat.num_unread
            seat.num_unread = width if method.uses_draft else None if unread is None else unread + width
        return True

    def _active(self, seats: list[Seat]) -> list[bool]:
        """For each row of a round, whether it belongs to one of these."""
        active = [False] * self.scheduler.num_rows
        for seat in seats:
            active[seat.slot] = True
        return active

    def _ends_soon(self, seat: Seat) -> bool:
        """Whether the rounds on their way are enough, because each emits a token at least."""
        said = len(seat.sequence.prompt) + len(seat.sequence.tokens)
        return said + seat.rounds_in_flight >= seat.sequence.limit

    def _pick(self, auto: Auto, seats: list[Seat]) -> tuple[Method, list[bool] | None]:
        """What `auto` means for these rows this turn, and which of them have something to look up."""
        matches = None
        if not self.models.fused and any(one.source == "lookup" for one in self.policy.methods):
            rows = self.device.slots.first(self.scheduler.num_rows)
            runs = (Lookup().find(rows)[0] > 0).tolist()
            matches = [runs[seat.slot] for seat in seats]
        context = sum(seat.length for seat in seats) // len(seats)
        num_rows = self.device.bucket(self.scheduler.num_rows)
        outlooks = [seat.outlook for seat in seats]
        return self.policy.pick(outlooks, matches, num_rows, context, auto.max_nodes), matches

    def _have_pages(self, seats: list[Seat], num_entries: int) -> bool:
        """See that every row has pages for what rounds write; False if others had to go for it."""
        size, grown = self.scheduler.pool.size, list[tuple[int, int, list[int]]]()
        lacking: tuple[Seat, int] | None = None
        for seat in seats:
            # The round may also run behind the text's limit, where only the dump page takes what it writes.
            end, before = seat.length + num_entries, len(seat.pages)
            if end <= before * size:
                continue
            end = min(end, seat.sequence.limit + MOST_NODES)
            pages = self.scheduler.grow(seat, end)
            if pages is None:
                lacking = seat, end
                break
            if pages:
                grown.append((seat.slot, before, pages))
        if grown:
            self.device.extend(*zip(*grown, strict=True))
        if lacking is not None:
            self._make_room(*lacking)
        return lacking is None

    def _make_room(self, seat: Seat, num_entries: int) -> None:
        """Let the youngest sequences wait; first see whether one on its way is done."""
        if self._flight:
            self.drain()
            return
        before, pages = len(seat.pages), None
        # Taken at once, or the one that waits would take them back.
        while pages is None and self.scheduler.seats.get(seat.slot) is seat:
            youngest = list(self.scheduler.seats.values())[-1]
            if youngest is seat and len(self.scheduler.seats) == 1:
                self._refuse(seat)
                return
            self.device.release([youngest.slot])
            self.scheduler.pause(youngest, num_entries if youngest is seat else youngest.length + 1)
            if youngest is not seat:
                pages = self.scheduler.grow(seat, num_entries)
        if pages:
            self.device.extend([seat.slot], [before], [pages])

    def _refuse(self, seat: Seat) -> None:
        """End a sequence for which all pages are not enough."""
        size = self.scheduler.pool.num_pages * self.scheduler.pool.size
        error = UserError(
            f"the KV memory of {size} tokens is too small for a text of {seat.length} tokens and a tree; "
            "give more (kv_memory)"
        )
        self._end(seat, error)

    def _end(self, seat: Seat, error: Exception) -> None:
        self._release(seat)
        seat.sequence.finish("closed", error)

    def _read_into_rings(self, seats: list[Seat], width: int) -> None:
        """See that the draft has read what its first pass does not take in."""
        behind = [seat for seat in seats if seat.num_unread is None or seat.num_unread > width]
        if behind:
            self.device.read_into_rings([seat.slot for seat in behind])

    def _compact(self) -> None:
        """Move rows to the front where that makes rounds smaller."""
        for left, slot in self.scheduler.compact(self.device.bucket(max(1, len(self.scheduler.seats)))):
            self.device.move(left, slot)

    def _read(self) -> None:
        """Hand what the oldest launch reported to its sequences; those that are done leave together."""
        launch = self._flight.popleft()
        reports = [report.read() for report in launch.reports]
        scores = None if launch.scores is None else launch.scores.read()
        self.device.check()
        for row, seat, has_match in launch.seats:
            if launch.method is None:
                seat.num_in_flight -= 1
                emitted = [reports[0][row]]
            else:
                seat.num_in_flight -= launch.width
                seat.rounds_in_flight -= len(reports)
                if len(reports) > 1:
                    emitted = [one[row][1] for one in reports if one[row][0]]
                else:
                    emitted = reports[0][row][1 : 1 + reports[0][row][0]]
            if emitted == [-1] and not seat.sequence.finished:
                self._end(seat, _overflow(self.models.target.dtype))
            elif emitted and not seat.sequence.finished:
                if scores is not None:
                    seat.sequence.keep_scores(scores[row])
                self._keep(seat, emitted, launch, has_match)
        done = [seat for _, seat, _ in launch.seats if seat.sequence.finished]
        done = [seat for seat in done if self.scheduler.seats.get(seat.slot) is seat]
        if done:
            self._release(*done)

    def _keep(self, seat: Seat, emitted: list[int], launch: _Launch, has_match: bool | None) -> None:
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
                self.policy.learn(seat.outlook, launch.method, len(emitted), has_match)
        self._learn_words(emitted)

    def _release(self, *seats: Seat) -> None:
        self.device.release([seat.slot for seat in seats])
        for seat in seats:
            self.scheduler.release(seat)


def _check_exact(method: Method) -> None:
    """Refuse a tree that is too deep for exact attention; a chain may be longer."""
    from longspec.kernels.exact import DEEPEST

    if DEEPEST < method.depth < method.num_nodes - 1:
        raise UserError(
            f"{method.label} is {method.depth} deep; exact trees have at most {DEEPEST}; lower num_lookup"
        )


def _overflow(dtype: torch.dtype) -> UserError:
    name = str(dtype).removeprefix("torch.")
    return UserError(
        f"the target's scores are not finite: its numbers overflow {name}, or its weights are damaged; take "
        "another dtype, bfloat16 or float32, or fetch the weights again"
    )
