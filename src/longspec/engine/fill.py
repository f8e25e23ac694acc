"""Computing prompts into the pages: segments of several sequences at once, or a long chunk of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.attention import AttentionPlan
from longspec.decoding.choose import choose
from longspec.decoding.round import Models
from longspec.decoding.slots import Slots
from longspec.models.passes import paged_pass

# Tokens of a segment: our own products take up to 64 rows, so one segment costs hardly more than a step.
SEGMENT = 64
# Segments that one pass takes.
MOST_SEGMENTS = 32


@dataclass(frozen=True)
class Segments:
    """n pieces of prompts, of at most SEGMENT tokens each, described on the device for the kernels."""

    slots: Tensor
    """The slot of each piece's sequence, int64 [n]."""
    starts: Tensor
    """Where each piece begins in its text, int64 [n]."""
    counts: Tensor
    """How many tokens each piece has, int64 [n]."""
    goals: Tensor
    """The slot if the piece ends a prompt, else the spare slot, int64 [n]."""
    tables: Tensor
    """The pages of all rows while their prompts are computed, int32 [R, M]. Rounds that run meanwhile see a
    row's pages only when its prompt is complete."""
    report: Tensor
    """For the host, int64 [n]: the first token of the answer, or -1 if the hidden state is not finite."""

    @classmethod
    def empty(cls, num_segments: int, tables: Tensor) -> Segments:
        """Segments of the spare row, which is the last one of the tables."""

        def whole() -> Tensor:
            return torch.zeros(num_segments, dtype=torch.int64, device=tables.device)

        made = cls(whole(), whole(), whole(), whole(), tables, whole())
        made.clear()
        return made

    def clear(self) -> None:
        """Give all segments to the spare row, so that computing them changes no sequence."""
        self.counts.zero_()
        for part in (self.slots, self.goals):
            part.fill_(len(self.tables) - 1)


def take_segments(models: Models, slots: Slots, work: Segments, sampled: bool) -> None:
    """Compute all pieces in one pass with our own kernels.

    A piece also sees the earlier pieces of its sequence in the same pass, because every layer writes the keys
    of all pieces before it attends.
    """
    from longspec.kernels.exact import chain_paths
    from longspec.kernels.tree import segment_places

    target, size = models.target, models.pages.size
    tokens, positions, places = segment_places(
        work.starts, work.counts, work.slots, work.tables, slots.text, size, SEGMENT
    )
    paths = chain_paths(positions) if models.exact else None
    plan = AttentionPlan(work.starts, work.tables[work.slots], size, SEGMENT, paths=paths)
    hidden = target(tokens, paged_pass(target, models.pages, positions, places, plan, True))
    last = (work.counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[2])
    finish_prompts(models, slots, work, hidden.gather(1, last)[:, 0], sampled)


def take_chunk(
    models: Models, slots: Slots, work: Segments, pages: list[int], start: int, count: int, sampled: bool
) -> None:
    """Compute `count` tokens of one sequence from `start` on, whose `pages` the host knows."""
    target, kv = models.target, models.pages
    positions = torch.arange(start, start + count, device=target.device)[None]
    table = work.tables[work.slots]
    places = kv.places(table, positions)
    plan = AttentionPlan(work.starts, table, kv.size, count, known=([start], [pages]))
    last = start + count - 1
    end = AttentionPlan(work.starts + count - 1, table, kv.size, 1, known=([last], [pages]))
    tokens = slots.text[work.slots, start : start + count]
    hidden = target(tokens, paged_pass(target, kv, positions, places, plan, models.fused, end))
    finish_prompts(models, slots, work, hidden[:, -1], sampled)


def finish_prompts(models: Models, slots: Slots, work: Segments, last: Tensor, sampled: bool) -> None:
    """Choose the first token of each complete prompt, from the hidden states `last` [n, E] at the ends of the
    pieces, and let its row run. Pieces that do not end a prompt write to the spare row."""
    goals, ends = work.goals, work.starts + work.counts
    logits = models.target.logits(last, models.exact)
    sampling = slots.sampling.at(goals) if sampled else slots.sampling
    if models.fused:
        from longspec.kernels.choose import choose_tokens

        tokens = choose_tokens(logits, sampling, slots.seeds[goals], ends, sampled)
    else:
        tokens = choose(logits, sampling, slots.seeds[goals], ends, sampled)
    # Clamped, because tokens are arbitrary while kernels are only compiled (`compile_for`).
    tokens = models.target.agree(tokens.clamp(0, logits.shape[1] - 1))
    # Finite weights can still overflow in the pass; the choice then means nothing.
    work.report.copy_(torch.where(last.isfinite().all(-1), tokens, -1))
    slots.text[goals, ends.clamp(max=slots.text.shape[1] - 1)] = tokens
    slots.seen.view(-1).index_fill_(0, goals * slots.seen.shape[1] + tokens, True)
    slots.lengths[goals] = ends
    slots.feature[goals] = last
    slots.num_unread.index_fill_(0, goals, 1)
    slots.tables[goals] = work.tables[goals]
    hit = (slots.eos_ids[goals] == tokens[:, None]).any(1)
    slots.running[goals] = ~hit & (ends + 1 < slots.limits[goals])
    slots.running[-1:] = False


def read_into_rings(models: Models, slots: Slots, goals: Tensor) -> None:
    """Write the draft's KV of the last tokens of the rows `goals` [n] into its ring: as many tokens as the
    window holds, without the root."""
    from longspec.kernels.rope import rope_write
    from longspec.models.fused import FusedOps

    draft, ring, target = models.draft, slots.ring, models.target
    assert draft is not None
    assert ring is not None
    window, num_entries = ring.window, ring.positions.shape[1]
    lengths = slots.lengths[goals][:, None]
    positions = (lengths - window).clamp(min=0) + torch.arange(window, device=goals.device)
    wanted = positions < lengths
    positions = torch.where(wanted, positions, 0)
    entries = torch.where(wanted, positions % window, num_entries - 1)
    held = torch.full((len(goals), num_entries), -1, dtype=torch.int64, device=goals.device)
    ring.positions[goals] = held.scatter_(1, entries, torch.where(wanted, positions, -1))
    ops = FusedOps()
    x, _ = ops.embed(slots.text[goals[:, None], positions], target.table, None, draft.reader)
    places = goals[:, None] * num_entries + entries
    rope_write(draft.enter(x, ops), target.rope.table, positions, places, *ring.flat)
    slots.num_unread.index_fill_(0, goals, 1)
