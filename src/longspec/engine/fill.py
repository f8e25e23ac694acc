"""Bringing prompts into the pages: in segments of several sequences at once, or a long one by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.attention import AttentionPlan
from longspec.decoding.choose import choose
from longspec.decoding.round import Models
from longspec.decoding.slots import Slots
from longspec.models.passes import paged_pass

# Tokens of a segment: as many as our own products are for, so that one segment costs hardly more than a step.
SEGMENT = 64
# Segments that one pass takes.
MOST_SEGMENTS = 32


@dataclass(frozen=True)
class Segments:
    """n pieces of prompts, of at most SEGMENT tokens each, where kernels can read what they are."""

    slots: Tensor
    """Whose they are, int64 [n]."""
    starts: Tensor
    """Where they begin in the text, int64 [n]."""
    counts: Tensor
    """How many tokens they have, int64 [n]."""
    goals: Tensor
    """The slot, where the piece is a prompt's end; else the spare one. int64 [n]"""
    tables: Tensor
    """The pages of all rows while their prompts are computed, int32 [R, M]: rounds in between see a row's
    pages only when its prompt is complete."""
    report: Tensor
    """For the host, int64 [n]: the first token of a prompt's answer, -1 where its scores are no numbers."""

    @classmethod
    def empty(cls, num_segments: int, tables: Tensor) -> Segments:
        """Nothing yet; the last row of the tables is the spare one."""

        def whole() -> Tensor:
            return torch.zeros(num_segments, dtype=torch.int64, device=tables.device)

        made = cls(whole(), whole(), whole(), whole(), tables, whole())
        made.clear()
        return made

    def clear(self) -> None:
        """Let it be nothing for anyone: all of it belongs to the spare row."""
        self.counts.zero_()
        for part in (self.slots, self.goals):
            part.fill_(len(self.tables) - 1)


def take_segments(models: Models, slots: Slots, work: Segments, sampled: bool) -> None:
    """Compute the pieces, all in one pass, by our own kernels.

    A piece sees those of its sequence that come before it, in this pass too: every layer writes the keys of
    all pieces before it attends.
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
    """Compute `count` tokens of one sequence from `start` on; its pages are known to the host."""
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
    """Choose the first token of each prompt that is complete, by the hidden states [n, E] at the pieces'
    ends, and let its row run. What belongs to no prompt's end goes to the spare row."""
    goals, ends = work.goals, work.starts + work.counts
    logits = models.target.logits(last, models.exact)
    sampling = slots.sampling.at(goals) if sampled else slots.sampling
    if models.fused:
        from longspec.kernels.choose import choose_tokens

        tokens = choose_tokens(logits, sampling, slots.seeds[goals], ends, sampled)
    else:
        tokens = choose(logits, sampling, slots.seeds[goals], ends, sampled)
    # Before a capture all of this runs without our kernels, and then no token is one.
    tokens = models.target.agree(tokens.clamp(0, logits.shape[1] - 1))
    # Weights that are finite can still overflow in the pass; whatever is chosen then means nothing.
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
    """Bring the last tokens of the rows `goals` [n], all but the root, into the draft's ring: as many as its
    window has, because more is never seen."""
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
