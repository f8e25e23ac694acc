"""Rounds that ask nothing of the host: fixed shapes and everything on the device.

On a GPU such a round is captured once, with all it launches, and then replayed; the host reads what a round
emitted while the next one runs. The same rounds run uncaptured on a CPU, read as late, which is how they are
tested there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from longspec.attention.base import copies_whole
from longspec.decoding.accept import Accepted
from longspec.decoding.choose import choose
from longspec.decoding.fill import Filler, pays
from longspec.decoding.graph import capture
from longspec.decoding.guard import Guarded, Resting
from longspec.decoding.loop import Acceptance, DecodeState, Method, advance
from longspec.decoding.tree import TokenTree, ancestors
from longspec.models.target import Transformer

# Rounds that may be on their way before the host has read the first of them.
_IN_FLIGHT = 2


@dataclass(frozen=True)
class Board:
    """What the rounds of one decode keep on the device beyond its state."""

    running: Tensor
    """bool [B]"""
    limits: Tensor
    """The length of text at which a row ends, int64 [B]."""
    ends: Tensor
    """The tokens that end a row, int64 [n]."""
    report: Tensor
    """For the host, int64 [B, 1 + W]: how many tokens the last round emitted, 0 for a row that stood
    still, and the tokens."""

    @classmethod
    def of(cls, state: DecodeState, width: int) -> Board:
        """The board for a state whose first tokens are chosen; rounds emit at most `width` tokens."""
        device, rows = state.cache.lengths.device, state.rows
        return cls(
            torch.tensor([not row.finished for row in rows], device=device),
            torch.tensor([len(row.prompt) + row.max_new_tokens for row in rows], device=device),
            torch.tensor(sorted(rows[0].eos_ids) or [-1], device=device),
            torch.zeros(len(rows), 1 + width, dtype=torch.int64, device=device),
        )


def width_of(method: Method) -> int:
    """The most tokens that a round can emit."""
    return method.depth + 1


def device_round(state: DecodeState, method: Method, board: Board) -> None:
    """Propose, verify, accept, commit, and note for the host what was emitted."""
    tree = method.propose(state)
    fused = state.target.attention.fuses(state.target.embedding)
    hidden, positions = (_verify_fused if fused else _verify)(state, tree, width_of(method) - 1)
    choices = _choices(state, hidden, positions, fused)
    (_settle_fused if fused else _settle)(state, tree, hidden, choices, board)


def _verify(state: DecodeState, tree: TokenTree, depth: int) -> tuple[Tensor, Tensor]:
    """The target's hidden states at a tree's nodes, and where those stand in the text, int64 [B, N]."""
    sees = ancestors(tree.parents)
    hidden = state.target(tree.tokens, state.cache, None if tree.num_nodes == 1 else sees)
    return hidden, state.cache.lengths[:, None] + sees.sum(-1) - 1


def _verify_fused(state: DecodeState, tree: TokenTree, depth: int) -> tuple[Tensor, Tensor]:
    """As `_verify`, but in few launches; the tree is at most `depth` deep."""
    from longspec.kernels.tree import tree_sees
    from longspec.models.fused import run_blocks

    target, cache = state.target, state.cache
    target.rope.reserve(cache.capacity)
    sees, positions, entries = tree_sees(tree.parents, depth, cache.lengths)
    plan = target.attention.plan(cache.lengths, tree.num_nodes, None if tree.num_nodes == 1 else sees)
    return run_blocks(target, tree.tokens, cache, positions, entries, plan), positions


def _settle(state: DecodeState, tree: TokenTree, hidden: Tensor, choices: Tensor, board: Board) -> None:
    """Accept and commit, and note what follows on the board."""
    found = _walk(tree, choices, board.report.shape[1] - 2)
    running, lengths = board.running, state.cache.lengths
    emitted, num_emitted = advance(state, tree, hidden, found, running)
    state.emitted.copy_(emitted)
    state.num_emitted.copy_(num_emitted)
    board.report[:, 0] = num_emitted * running
    board.report[:, 1:] = emitted
    real = torch.arange(emitted.shape[1], device=emitted.device) < num_emitted[:, None]
    ended = ((emitted[:, :, None] == board.ends).any(-1) & real).any(-1) | (lengths + 1 >= board.limits)
    running.logical_and_(~ended)
    # A round may run past a row's limit; there is room for its nodes only behind the limit itself.
    lengths.clamp_(max=board.limits - 1)


def _settle_fused(state: DecodeState, tree: TokenTree, hidden: Tensor, choices: Tensor, board: Board) -> None:
    """As `_settle`, but in few launches."""
    from longspec.kernels.commit import commit_path
    from longspec.kernels.settle import settle_round

    path, num_kept, before = settle_round(
        tree.tokens,
        tree.parents,
        choices,
        hidden,
        state.cache.lengths,
        board.limits,
        board.ends,
        board.running,
        state.emitted,
        state.num_emitted,
        board.report,
        state.feature,
    )
    commit_path(state.cache.keys, state.cache.values, before, path, num_kept)


def _choices(state: DecodeState, hidden: Tensor, positions: Tensor, fused: bool) -> Tensor:
    """The target's choice at every node, int64 [B, N]; the nodes stand at these positions."""
    B, N, _ = hidden.shape
    logits = state.target.logits(hidden).flatten(0, 1)
    if fused:
        from longspec.kernels.choose import choose_tokens

        return choose_tokens(logits, state.seeds, positions, **vars(state.sampling), ahead=1).view(B, N)
    seeds = state.seeds[:, None].expand(B, N).flatten()
    return choose(logits, state.sampling, seeds, (positions + 1).flatten()).view(B, N)


def _walk(tree: TokenTree, choices: Tensor, depth: int) -> Accepted:
    """As `accept_coupled` walks, but always `depth` steps."""
    node = torch.zeros_like(tree.tokens[:, 0])
    moving = torch.ones_like(node, dtype=torch.bool)
    num_accepted, steps = node, [node]
    for _ in range(depth):
        choice = choices.gather(1, node[:, None])
        matches = (tree.parents == node[:, None]) & (tree.tokens == choice)
        matches[:, 0] = False  # the root is nobody's child
        moving = moving & matches.any(1)
        node = torch.where(moving, matches.long().argmax(1), node)
        num_accepted = num_accepted + moving
        steps.append(node)
    return Accepted(torch.stack(steps, 1), num_accepted, choices.gather(1, node[:, None])[:, 0])


class DeviceRounds:
    """The rounds of decodes that share a method, a batch and a cache; on a GPU a captured graph.

    A guarded decode switches between two of them over the same state: rounds of the method, and rounds in
    which the target goes on alone and the method only follows.
    """

    def __init__(self, state: DecodeState, method: Method) -> None:
        self.cache = state.cache
        self._methods: dict[bool, Method] = {True: method, False: Resting(method)}
        self._width = width_of(method)
        # Of its own, for the graphs hold on to the places of all that they read and write.
        emitted = state.emitted.new_zeros(len(state.rows), self._width)
        self._state = replace(
            state,
            seeds=state.seeds.clone(),
            emitted=emitted,
            num_emitted=state.num_emitted.clone(),
            feature=state.feature.clone(),
        )
        self._board = Board.of(state, self._width)
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._tables: list[Tensor] = []

    def run(self, state: DecodeState, guard: Guarded | None = None) -> Iterator[list[list[int]]]:
        """What each row emits, round by round, from a state whose first tokens are chosen.

        It never ends by itself: the caller stops asking when the texts are done, and what is on its way then
        touches nothing that was said. A guard hears of each round when it is read, and so decides about the
        one after the next.
        """
        self._adopt(state)
        self._methods[True].begin(self._state)
        if state.target.device.type == "cuda":
            for speculates in (True,) if guard is None else (True, False):
                if speculates not in self._graphs:
                    self._graphs[speculates] = self._captured(self._methods[speculates])
        slots = [_Slot.like(self._board.report) for _ in range(_IN_FLIGHT)]
        launched = read = 0
        while True:
            while launched - read < _IN_FLIGHT:
                self._launch(slots[launched % _IN_FLIGHT], guard is None or guard.speculates)
                launched += 1
            slot = slots[read % _IN_FLIGHT]
            emitted = slot.read()
            read += 1
            if guard is not None:
                num_nodes = self._methods[slot.speculated].num_nodes
                guard.book([len(tokens) for tokens in emitted], num_nodes)
            yield emitted

    def _adopt(self, state: DecodeState) -> None:
        ours, board, fresh = self._state, self._board, Board.of(state, self._width)
        ours.rows = state.rows
        ours.seeds.copy_(state.seeds)
        ours.emitted[:, :1] = state.emitted
        ours.num_emitted.copy_(state.num_emitted)
        ours.feature.copy_(state.feature)
        board.running.copy_(fresh.running)
        board.limits.copy_(fresh.limits)

    def _launch(self, slot: _Slot, speculates: bool) -> None:
        """Set one round going, and its report on the way to the host."""
        if speculates in self._graphs:
            self._graphs[speculates].replay()
        else:
            device_round(self._state, self._methods[speculates], self._board)
        slot.send(self._board.report, speculates)

    def _captured(self, method: Method) -> torch.cuda.CUDAGraph:
        """One round, recorded. Rounds that warm up and record run with every row at rest and its root as
        the one thing it emitted, which is so at the beginning, and change nothing."""
        running = self._board.running.clone()
        self._board.running.zero_()
        work = partial(device_round, self._state, method, self._board)
        graph = capture(work, self._state.target.device)
        # The graph reads this very table, and the target takes another one when a longer text comes.
        self._tables.append(self._state.target.rope.table)
        self._board.running.copy_(running)
        return graph


@dataclass
class _Slot:
    """A place on the host for what one round reports."""

    report: Tensor
    event: torch.cuda.Event | None
    """Tells when the report is there; None where it is at once."""
    speculated: bool = True

    @classmethod
    def like(cls, report: Tensor) -> _Slot:
        """A slot for such reports."""
        if report.device.type != "cuda":
            return cls(torch.empty_like(report), None)
        return cls(torch.empty_like(report, device="cpu").pin_memory(), torch.cuda.Event())

    def send(self, report: Tensor, speculated: bool) -> None:
        """Have the report copied here when its round is done."""
        self.report.copy_(report, non_blocking=True)
        self.speculated = speculated
        if self.event is not None:
            self.event.record()

    def read(self) -> list[list[int]]:
        """What each row emitted, once it is here."""
        if self.event is not None:
            self.event.synchronize()
        return [row[1 : 1 + row[0]] for row in self.report.tolist()]


class RoundStore:
    """The rounds of the last few methods over one cache, and what fills it, between requests."""

    MOST = 8
    """Methods whose rounds are kept."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, ...], DeviceRounds] = {}
        self._filler: Filler | None = None

    def __call__(
        self, state: DecodeState, method: Method, acceptance: Acceptance
    ) -> Iterator[list[list[int]]]:
        """See `Rounds`; the method must have a `device_key`."""
        self._check(state)
        guard = method if isinstance(method, Guarded) else None
        key = (method.device_key, state.sampling, state.rows[0].eos_ids)
        rounds = self._kept.get(key)
        if rounds is None or rounds.cache is not state.cache:
            while len(self._kept) >= self.MOST:
                del self._kept[next(iter(self._kept))]
            rounds = self._kept[key] = DeviceRounds(state, method if guard is None else guard.method)
        return rounds.run(state, guard)

    def fill(self, state: DecodeState) -> bool:
        """See `Fill`. The first prompt over a cache pays for the recording."""
        self._check(state)
        if not pays(state):
            return False
        filler = self._filler
        if filler is None:
            filler = self._filler = Filler(state.target, state.cache)
        # Another thread may have put its own there meanwhile.
        if filler.cache is not state.cache:
            return False
        filler.fill(state)
        return True

    def _check(self, state: DecodeState) -> None:
        """Graphs over another cache are of no use to this state."""
        filler = self._filler  # which another thread may let go meanwhile, as it may the rest
        held = [kept.cache for kept in list(self._kept.values())]
        held += [] if filler is None else [filler.cache]
        if any(cache is not state.cache for cache in held):
            self.clear()

    def clear(self) -> None:
        """Let go of the graphs, and of the cache that they hold on to."""
        self._kept.clear()
        self._filler = None


def replays(target: Transformer) -> bool:
    """Whether rounds over this target are captured and replayed: on a GPU, with kernels that allow it."""
    # Heads of an odd size are left to torch's kernels, which ask the host.
    even = copies_whole(target.config.head_dim, target.dtype)
    with torch.inference_mode():
        return target.device.type == "cuda" and even and target.attention.fuses(target.embedding)


def needs_no_host(state: DecodeState, method: Method) -> bool:
    """Whether every round of this decode can go without the host."""
    alike = all(row.eos_ids == state.rows[0].eos_ids for row in state.rows)
    return method.device_key is not None and alike and state.seen is None
