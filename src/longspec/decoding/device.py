"""Rounds that ask nothing of the host: fixed shapes and everything on the device.

On a GPU such a round is captured once, with all it launches, and then replayed; the host reads what a round
emitted while the next one runs. The same rounds run uncaptured on a CPU, which is how they are tested there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longspec.decoding.accept import Accepted
from longspec.decoding.choose import choose
from longspec.decoding.loop import Acceptance, DecodeState, Method, advance
from longspec.decoding.tree import TokenTree
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
    return len(method.tree_shape or ()) + 1


def device_round(state: DecodeState, method: Method, board: Board) -> None:
    """Propose, verify, accept, commit, and note for the host what was emitted."""
    tree = method.propose(state)
    sees = tree.sees()
    hidden = state.target(tree.tokens, state.cache, sees)
    found = _walk(tree, _choices(state, hidden, sees), width_of(method) - 1)
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


def _choices(state: DecodeState, hidden: Tensor, sees: Tensor | None) -> Tensor:
    """The target's choice at every node, int64 [B, N]."""
    B, N, _ = hidden.shape
    depths = torch.zeros(1, 1, device=hidden.device, dtype=torch.int64) if sees is None else sees.sum(-1) - 1
    positions = (state.cache.lengths[:, None] + depths + 1).expand(B, N)
    logits = state.target.logits(hidden).flatten(0, 1)
    seeds, positions = state.seeds[:, None].expand(B, N).flatten(), positions.flatten()
    if state.target.attention.fuses(hidden):
        from longspec.kernels.choose import choose_tokens

        return choose_tokens(logits, seeds, positions, **vars(state.sampling)).view(B, N)
    return choose(logits, state.sampling, seeds, positions).view(B, N)


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
    """The rounds of decodes that share a method, a batch and a cache; on a GPU one captured graph."""

    def __init__(self, state: DecodeState, method: Method) -> None:
        self.cache = state.cache
        self._method, self._width = method, width_of(method)
        # Of its own, for the graph holds on to the places of all that it reads and writes.
        emitted = state.emitted.new_zeros(len(state.rows), self._width)
        self._state = replace(
            state,
            seeds=state.seeds.clone(),
            emitted=emitted,
            num_emitted=state.num_emitted.clone(),
            feature=state.feature.clone(),
        )
        self._board = Board.of(state, self._width)
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, state: DecodeState) -> Iterator[list[list[int]]]:
        """What each row emits, round by round, from a state whose first tokens are chosen.

        It never ends by itself: the caller stops asking when the texts are done, and what is on its way then
        touches nothing that was said.
        """
        self._adopt(state)
        self._method.begin(self._state)
        if state.target.device.type != "cuda":
            while True:
                device_round(self._state, self._method, self._board)
                yield _read(self._board.report)
        if self._graph is None:
            self._capture()
        yield from self._replay()

    def _adopt(self, state: DecodeState) -> None:
        ours, board, fresh = self._state, self._board, Board.of(state, self._width)
        ours.rows = state.rows
        ours.seeds.copy_(state.seeds)
        ours.emitted[:, :1] = state.emitted
        ours.num_emitted.copy_(state.num_emitted)
        ours.feature.copy_(state.feature)
        board.running.copy_(fresh.running)
        board.limits.copy_(fresh.limits)

    def _replay(self) -> Iterator[list[list[int]]]:
        assert self._graph is not None
        report = self._board.report
        slots = [torch.empty_like(report, device="cpu").pin_memory() for _ in range(_IN_FLIGHT)]
        events = [torch.cuda.Event() for _ in slots]
        launched = read = 0
        while True:
            while launched - read < _IN_FLIGHT:
                self._graph.replay()
                slot = launched % _IN_FLIGHT
                slots[slot].copy_(report, non_blocking=True)
                events[slot].record()
                launched += 1
            slot = read % _IN_FLIGHT
            events[slot].synchronize()
            read += 1
            yield _read(slots[slot])

    def _capture(self) -> None:
        """Record one round. Rounds that warm up and record run with every row at rest, and change nothing."""
        running = self._board.running.clone()
        self._board.running.zero_()
        device = self._state.target.device
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(2):
                device_round(self._state, self._method, self._board)
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            device_round(self._state, self._method, self._board)
        self._graph = graph
        self._board.running.copy_(running)


def _read(report: Tensor) -> list[list[int]]:
    return [row[1 : 1 + row[0]] for row in report.tolist()]


class RoundStore:
    """The rounds of the last few methods over one cache, between requests."""

    _MOST = 4

    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, ...], DeviceRounds] = {}

    def __call__(
        self, state: DecodeState, method: Method, acceptance: Acceptance
    ) -> Iterator[list[list[int]]]:
        """See `Rounds`; the method must have a `device_key`."""
        if any(kept.cache is not state.cache for kept in self._kept.values()):
            self.clear()
        key = (method.device_key, state.sampling, state.rows[0].eos_ids)
        if key not in self._kept:
            while len(self._kept) >= self._MOST:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = DeviceRounds(state, method)
        return self._kept[key].run(state)

    def clear(self) -> None:
        """Let go of the graphs, and of the cache that they hold on to."""
        self._kept.clear()


def replays(target: Transformer) -> bool:
    """Whether rounds over this target are captured and replayed: on a GPU, with kernels that allow it."""
    with torch.inference_mode():
        return target.device.type == "cuda" and target.attention.fuses(target.embedding)


def needs_no_host(state: DecodeState, method: Method) -> bool:
    """Whether every round of this decode can go without the host."""
    alike = all(row.eos_ids == state.rows[0].eos_ids for row in state.rows)
    return method.device_key is not None and alike and state.seen is None
