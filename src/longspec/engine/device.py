"""What the engine does on the device: rows come and go, prompts are computed, rounds run.

On a GPU rounds and segments of prompts are captured once for each method and number of rows, and replayed
from then on. Everything is launched on one stream, in order: what is launched later sees what came before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from longspec.cache import DraftRing, Pages
from longspec.decoding.guided import run_guided
from longspec.decoding.methods import MOST_NODES, Method, MethodChoice
from longspec.decoding.round import Models, run_round
from longspec.decoding.sampling import Sampling
from longspec.decoding.slots import MOST_EOS, Slots
from longspec.engine.fill import MOST_SEGMENTS, SEGMENT, Segments, read_into_rings, take_chunk, take_segments
from longspec.engine.graph import capture
from longspec.engine.memory import EngineSize
from longspec.engine.orders import on_every_rank
from longspec.engine.transfer import Report, put_rows, to_device
from longspec.models.draft import ContextHead, DraftHead, GlideDraft
from longspec.models.target import Transformer

if TYPE_CHECKING:
    from longspec.engine.ranks import Ranks

Work = tuple[tuple[Any, ...], Callable[[], None]]
"""The key of a graph, and the function that launches its kernels."""
Group = tuple[MethodChoice, bool]
"""Sequences of one group run in the same rounds: the method they asked for, and whether nodes are drawn."""


@dataclass(frozen=True)
class PromptPart:
    """Tokens of a prompt that are computed together."""

    slot: int
    start: int
    count: int
    is_end: bool
    pages: list[int]


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """The numbers of rows that rounds are captured for."""
    return (*(2**power for power in range(max_rows.bit_length()) if 2**power < max_rows), max_rows)


class Device:
    """The slots of an engine and what is done with them."""

    def __init__(self, models: Models, max_rows: int, max_length: int, num_nodes: int) -> None:
        target, page = models.target, models.pages.size
        self.models, self.max_rows = models, max_rows
        self.ranks: Ranks | None = None
        """The other ranks, where this process is rank 0 of several."""
        self._base_head = models.head if isinstance(models.head, DraftHead) else None
        # A round may run past the end of a text by a tree, and a segment by its padding.
        beyond = MOST_NODES + SEGMENT
        target.rope.reserve(max_length + beyond)
        self.slots = Slots.empty(
            target.config,
            None if models.draft is None else models.draft.config,
            max_rows + 1,  # the last is the spare row: what is written there is discarded
            max_length + 1,
            -(-(max_length + beyond) // page),
            num_nodes,
            MOST_NODES,
            target.device,
            target.dtype,
        )
        self._rows: dict[int, Slots] = {}
        self.num_captures, self.capture_seconds = 0, 0.0
        """How many graphs were captured, and how long one of the newest took."""
        self._fill_tables = torch.zeros_like(self.slots.tables)
        self._segments: dict[int, Segments] = {}
        self._rings: dict[int, Tensor] = {}
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self.captures = models.fused and target.device.type == "cuda"
        """Whether work is captured in graphs and replayed."""
        if target.shard is not None:
            self.captures = self.captures and target.shard.can_capture
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None
        self._active: list[bool] = [False] * (max_rows + 1)
        self.buckets = row_buckets(max_rows) if models.fused else tuple(range(1, max_rows + 1))

    @on_every_rank
    def reserve_nodes(self, num_nodes: int) -> bool:
        """Make room behind the draft's ring for larger trees. Returns whether that emptied the ring."""
        ring, draft = self.slots.ring, self.models.draft
        if ring is None or draft is None or ring.positions.shape[1] > ring.window + num_nodes:
            return False
        target = self.models.target
        shape = replace(target.config, num_kv_heads=ring.keys.shape[1])
        rows = ring.keys.shape[0]
        ring = DraftRing.empty(shape, draft.config, rows, num_nodes, target.device, target.dtype)
        self.slots = replace(self.slots, ring=ring)
        self._rows.clear()
        self._graphs.clear()
        return True

    def rows(self, num_rows: int) -> Slots:
        """The first slots."""
        if num_rows not in self._rows:
            self._rows[num_rows] = self.slots.first(num_rows)
        return self._rows[num_rows]

    def bucket(self, num_rows: int) -> int:
        """The number of rows that a round over the first `num_rows` computes."""
        return next(size for size in self.buckets if size >= num_rows)

    @on_every_rank
    def admit(
        self,
        slots: Sequence[int],
        texts: Sequence[list[int]],
        pages: Sequence[list[int]],
        limits: Sequence[int],
        seeds: Sequence[int],
        settings: Sequence[Sampling],
        eos_ids: Sequence[frozenset[int]],
    ) -> None:
        """Give rows to sequences whose prompts are to be computed."""
        rows, ours = self._send(list(slots)), self.slots
        ends = [[*sorted(one)[:MOST_EOS], *[-1] * (MOST_EOS - len(one))] for one in eos_ids]
        numbers = self._send([list(limits), list(seeds)])
        ours.limits[rows], ours.seeds[rows] = numbers[0], numbers[1]
        ours.eos_ids[rows] = self._send(ends)
        ours.sampling.put(rows, settings)
        # Fill, do not assign: an assigned number is copied from the host, which would wait for the copy.
        for part, value in ((ours.lengths, 0), (ours.running, False), (ours.num_unread, 1)):
            part.index_fill_(0, rows, value)
        for part in (ours.tables, self._fill_tables):
            part.index_fill_(0, rows, 0)
        if ours.ring is not None:
            ours.ring.positions.index_fill_(0, rows, -1)
        tokens = put_rows(ours.text, slots, texts)
        put_rows(self._fill_tables, slots, pages)
        ends = np.cumsum([len(text) for text in texts]).tolist()
        for slot, text, end, sampling in zip(slots, texts, ends, settings, strict=True):
            if sampling.repetition_penalty != 1:
                ours.seen[slot].index_fill_(0, tokens[end - len(text) : end], True)

    @on_every_rank
    def extend(self, slots: Sequence[int], starts: Sequence[int], pages: Sequence[list[int]]) -> None:
        """Give rows more pages; `starts` are their places in the rows' tables."""
        put_rows(self.slots.tables, slots, pages, starts)

    @on_every_rank
    def release(self, slots: Sequence[int]) -> None:
        """Let rows rest. Rounds in flight then write to the dump page."""
        rows = self._send(list(slots))
        for part in (self.slots.running, self.slots.tables, self.slots.lengths):
            part.index_fill_(0, rows, 0)

    @on_every_rank
    def move(self, source: int, goal: int) -> None:
        """Move a row to a slot that is at rest."""
        self.slots.move(source, goal)
        self._fill_tables[goal].copy_(self._fill_tables[source])
        self._active[goal] = self._active[source]
        self.release([source])

    @on_every_rank
    def rewind(self, slots: Sequence[int], texts: Sequence[list[int]]) -> None:
        """Undo the choice of the first token in rows whose prompts were just computed: the next round starts
        at the prompt's last token."""
        rows, ours = self._send(list(slots)), self.slots
        ours.lengths[rows] = self._send([len(text) - 1 for text in texts])
        ours.running.index_fill_(0, rows, True)
        ours.seen.index_fill_(0, rows, False)
        for slot, text in zip(slots, texts, strict=True):
            ours.seen[slot].index_fill_(0, self._send(text), True)

    @on_every_rank
    def take(self, pieces: Sequence[PromptPart], sampled: bool) -> Report:
        """Compute pieces of prompts. A piece at the end of a prompt reports the first token of the answer."""
        if not self.models.fused or pieces[0].count > SEGMENT:
            assert len(pieces) == 1
            work, piece = self._describe(pieces, 1), pieces[0]
            take_chunk(self.models, self.slots, work, piece.pages, piece.start, piece.count, sampled)
            return Report(work.report)
        size = next(size for size in row_buckets(MOST_SEGMENTS) if size >= len(pieces))
        work = self._describe(pieces, size)
        self._run(self.segments_work(size, sampled))
        return Report(work.report)

    def _describe(self, pieces: Sequence[PromptPart], size: int) -> Segments:
        """The segments that the graph of this size reads, filled with these pieces."""
        work, spare = self._segments_of(size), self.max_rows
        padding = [[spare, 0, 0, spare]] * (size - len(pieces))
        facts = [[p.slot, p.start, p.count, p.slot if p.is_end else spare] for p in pieces] + padding
        numbers = self._send(facts).T
        for part, values in zip((work.slots, work.starts, work.counts, work.goals), numbers, strict=True):
            part.copy_(values)
        return work

    @on_every_rank
    def read_into_rings(self, slots: Sequence[int]) -> None:
        """Let the draft read the texts of these rows; see `longspec.engine.fill`."""
        size = next(size for size in row_buckets(self.max_rows) if size >= len(slots))
        work = self.ring_work(size)
        self._rings[size].copy_(self._send([*slots, *[self.max_rows] * (size - len(slots))]))
        self._run(work)

    @on_every_rank
    def round(self, method: Method, num_rows: int, active: Sequence[bool], sampled: bool) -> Report:
        """Run one round of a fitted method over the first rows, for those that are `active`."""
        size = self.bucket(num_rows)
        self._activate([*active, *[False] * (size - len(active))])
        self._run(self.round_work(method, size, sampled))
        return Report(self.slots.report[:num_rows, : method.depth + 2])

    @on_every_rank
    def guided_round(
        self, active: Sequence[bool], sampled: bool, masks: Tensor | None, num_top: int
    ) -> tuple[Report, Report]:
        """Run a vanilla round over the first rows, for those that are `active`; see `run_guided`.

        It is not captured, because few sequences need it, and each number of probabilities is another shape.
        """
        size = self.bucket(len(active))
        self._activate([*active, *[False] * (size - len(active))])
        rows = self.rows(size)
        if masks is not None:
            masks = masks[:size].to(rows.lengths.device)
        scores = run_guided(self.models, rows, sampled, masks, num_top)
        return Report(rows.report[: len(active), :2]), Report(scores[: len(active)])

    @on_every_rank
    def learn_words(self, tokens: list[int], forgets: bool) -> None:
        """Let the draft propose these tokens too; if `forgets`, tokens that it learned before no more."""
        assert self._base_head is not None
        if forgets:
            self.models.head = self._base_head.in_context(tokens)
        elif isinstance(self.models.head, ContextHead):
            self.models.head.add(tokens)

    @on_every_rank
    def place_rows(self, num_rows: int, context: int) -> None:
        """Let the first rows run as if they had texts of `context` tokens, to time rounds. Rows may share
        pages, because no text's KV is kept (`Engine.paused`)."""
        rows, pages = self.rows(num_rows), self.models.pages.num_pages
        numbers = torch.arange(rows.tables.numel(), device=rows.tables.device).view(rows.tables.shape)
        rows.tables.copy_(numbers % pages + 1)
        rows.lengths.fill_(context)
        rows.limits.fill_(self.slots.text.shape[1] - 1)
        rows.running.fill_(True)
        rows.num_unread.fill_(1)

    @on_every_rank
    def rest(self) -> None:
        """Let all rows rest, and empty the draft's ring."""
        self.release(range(self.max_rows))
        if self.slots.ring is not None:
            self.slots.ring.positions.fill_(-1)

    def check(self) -> None:
        """Raise if a rank is lost, because the results are then wrong."""
        if self.ranks is not None:
            self.ranks.check()

    def _activate(self, wanted: list[bool]) -> None:
        size = len(wanted)
        if self._active[:size] != wanted:
            self.slots.active[:size] = self._send(wanted)
            self._active[:size] = wanted

    def _segments_of(self, size: int) -> Segments:
        if size not in self._segments:
            self._segments[size] = Segments.empty(size, self._fill_tables)
        return self._segments[size]

    def segments_work(self, size: int, sampled: bool) -> Work:
        work = self._segments_of(size)
        return ("segments", size, sampled), partial(take_segments, self.models, self.slots, work, sampled)

    def ring_work(self, size: int) -> Work:
        """The work of letting the draft read the texts of `size` rows."""
        if size not in self._rings:
            self._rings[size] = self._send([self.max_rows] * size)
        return ("ring", size), partial(read_into_rings, self.models, self.slots, self._rings[size])

    def round_work(self, method: Method, size: int, sampled: bool) -> Work:
        def launch() -> None:
            # The views of the first rows are made here, so that a replay does not make them.
            run_round(self.models, self.rows(size), method, sampled)

        return (method, size, sampled), launch

    def is_ready(self, method: Method, size: int, sampled: bool) -> bool:
        """Whether this round is captured."""
        return (method, size, sampled) in self._graphs

    def _run(self, work: Work) -> None:
        """Do the work: replay its graph, captured at first use, or launch it where nothing is captured."""
        key, launch = work
        if not self.captures:
            launch()
            return
        if key not in self._graphs:
            self.record([work])
        self._graphs[key].replay()

    @on_every_rank
    def prepare(self, keys: Sequence[tuple[Any, ...]]) -> None:
        """Capture the work with these keys."""
        kinds: dict[Any, Callable[..., Work]] = {"segments": self.segments_work, "ring": self.ring_work}
        works = [
            kinds[kind](*rest) if kind in kinds else self.round_work(kind, *rest) for kind, *rest in keys
        ]
        self.record(works)

    def record(self, works: Sequence[Work]) -> None:
        """Capture the works that have no graph yet. All rows rest meanwhile, because each work runs a few
        times.

        The kernels of all works are compiled first, in parallel.
        """
        new = {key: launch for key, launch in works if key not in self._graphs}
        if not new:
            return
        segments = self._segments.values()
        parts = [part for work in segments for part in (work.slots, work.counts, work.goals)]
        parts += [self.slots.running, *self._rings.values()]
        kept = [part.clone() for part in parts]
        self.slots.running.zero_()
        for work in segments:
            work.clear()
        for rows in self._rings.values():
            rows.fill_(self.max_rows)
        started = time.perf_counter()
        graphs = capture(list(new.values()), self.models.target.device, self._pool)
        self.capture_seconds = (time.perf_counter() - started) / len(graphs)
        self._graphs.update(zip(new, graphs, strict=True))
        self.num_captures += len(graphs)
        for part, values in zip(parts, kept, strict=True):
            part.copy_(values)

    def _send(self, values: list[Any]) -> Tensor:
        return to_device(values, self.models.target.device)


def make_device(
    target: Transformer,
    draft: GlideDraft | None,
    head: DraftHead | None,
    size: EngineSize,
    num_nodes: int,
    exact: bool,
) -> Device:
    """A device with pages and slots of this size, and room for trees of `num_nodes`."""
    first: Any = target.blocks[0]
    # Tensor parallelism in training divides the layer's KV heads, and leaves the config as it is.
    shape = replace(target.config, num_kv_heads=first.attention.num_kv_heads)
    pages = Pages.empty(shape, size.num_pages, size.page_size, target.device, target.kv_dtype)
    models = Models(target, pages, target.can_fuse, draft, head, exact)
    return Device(models, size.max_rows, size.max_length, num_nodes)
