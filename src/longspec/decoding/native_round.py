"""Parts of a round on a CPU by our C code (`native/choose.h`, `native/rounds.h`).

torch's operations take longer to start there than to run.
"""

from __future__ import annotations

from ctypes import pointer
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspec.native.build import Choosing, Rows, SamplingOfRows, code, library

if TYPE_CHECKING:
    from longspec.decoding.choose import SamplingRows
    from longspec.decoding.slots import Slots
    from longspec.decoding.tree import TokenTree


def has_code(x: Tensor) -> bool:
    """Whether there is C code where x is."""
    return x.device.type == "cpu" and library() is not None


def is_native(x: Tensor) -> bool:
    """Whether the C code can compute with x."""
    return x.dtype == torch.float32 and has_code(x)


def describe_nodes(
    parents: Tensor, is_chain: bool, lengths: Tensor, tables: Tensor, page_size: int
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Which nodes each node of a tree sees, bool [B, N, N], or None for a chain; their positions and their
    places in the pages, int64 [B, N] each. `lengths` [B] are those of the rows' prefixes."""
    (B, N), parents = parents.shape, parents.contiguous()
    sees = None if is_chain or N == 1 else torch.empty(B, N, N, dtype=torch.bool)
    positions, places = torch.empty(2, B, N, dtype=torch.int64).unbind(0)
    code().describe_nodes(
        parents.data_ptr(), B, N, lengths.data_ptr(), tables.data_ptr(), tables.shape[1], page_size,
        None if sees is None else sees.data_ptr(), positions.data_ptr(), places.data_ptr(),
    )  # fmt: skip
    return sees, positions, places


def choose_tokens(
    logits: Tensor,
    sampling: SamplingRows,
    seeds: Tensor,
    positions: Tensor,
    sampled: bool,
    path: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The token of each row, int64 [R]: what `longspec.decoding.choose.choose` describes.

    Row r of logits, fp32 [R, V], belongs to sequence row r // (R / B) of `sampling` and of seeds, int64 [B];
    positions are int64 [R]. `path` is for trees: the nodes' tokens and parents, int64 [B, N] with N = R / B.
    Then the tokens of a row's node and of its ancestors count as seen, too.
    """
    logits = logits.contiguous()
    (R, V), out = logits.shape, torch.empty(len(logits), dtype=torch.int64)
    held: list[Tensor] = [logits, out]

    def place(part: Tensor) -> int:
        held.append(part.contiguous())
        return held[-1].data_ptr()

    job = Choosing(logits=logits.data_ptr(), size=V, num_nodes=R // len(seeds), out=out.data_ptr())
    if sampled:
        names = ("temperature", "top_p", "min_p", "penalty", "top_k", "seen")
        job.sampling = pointer(SamplingOfRows(*(place(getattr(sampling, name)) for name in names)))
        job.seeds, job.positions = place(seeds), place(positions)
        if path is not None:
            job.tokens, job.parents = map(place, path)
    code().choose(job, R, torch.get_num_threads())
    return out


def settle_round(
    tree: TokenTree, choices: Tensor, hidden: Tensor, rows: Slots, width: int, accumulate: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Walk from the root along the target's choices to the last accepted node, and update the rows, as
    `longspec.decoding.round.settle` does.

    choices are int64 [B, N]; a round emits at most `width` tokens. Returns what has to be moved in the pages,
    or None if all is in place: the path from the root, int64 [B, width], its last node repeated; how many of
    its nodes to keep, int64 [B]; the lengths before the round.
    """
    B, N = tree.tokens.shape
    tokens, parents, hidden = tree.tokens.contiguous(), tree.parents.contiguous(), hidden.contiguous()
    path = torch.empty(B, width, dtype=torch.int64)
    num_kept, before = torch.empty(2, B, dtype=torch.int64).unbind(0)
    assert rows.report.shape[1] > width
    moved = code().settle(
        rows_of(rows), B, tokens.data_ptr(), parents.data_ptr(), choices.data_ptr(), hidden.data_ptr(), N,
        width, accumulate, path.data_ptr(), num_kept.data_ptr(), before.data_ptr(),
    )  # fmt: skip
    return (path, num_kept, before) if moved else None


def rows_of(rows: Slots) -> Rows:
    """What the C code reads and changes of these rows."""
    return Rows(
        rows.lengths.data_ptr(), rows.num_unread.data_ptr(), rows.report.data_ptr(), rows.text.data_ptr(),
        rows.limits.data_ptr(), rows.eos_ids.data_ptr(), rows.feature.data_ptr(), rows.running.data_ptr(),
        rows.seen.data_ptr(), rows.active.data_ptr(), rows.feature.shape[1], rows.eos_ids.shape[1],
        rows.report.stride(0), rows.text.stride(0), rows.seen.shape[1],
    )  # fmt: skip


def find_runs(text: Tensor, ends: Tensor, min_run: int, max_run: int) -> tuple[Tensor, Tensor]:
    """What `longspec.decoding.lookup.find` describes."""
    assert text.stride(1) == 1
    ends = ends.contiguous()
    runs, places = torch.empty(2, len(ends), dtype=torch.int64).unbind(0)
    code().find(
        text.data_ptr(), text.stride(0), ends.data_ptr(), len(ends), min_run, max_run, runs.data_ptr(),
        places.data_ptr(),
    )  # fmt: skip
    return runs, places


def draft_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise [R, V'] in fp32 for these token ids at (seed, position), each int64 [R]."""
    noise = torch.empty(len(seeds), len(token_ids), dtype=torch.float32)
    token_ids = token_ids.contiguous()
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        code().noise(seed, position, token_ids.data_ptr(), len(token_ids), noise[row].data_ptr())
    return noise
