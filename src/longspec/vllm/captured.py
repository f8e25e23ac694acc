"""Chains as CUDA graphs: the draft is so small that its launches would take longer than its work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.vllm.chain import ChainParts, CrossAttention, Roots, draft_chain

Work = Callable[[], object]


@dataclass(frozen=True)
class _Batch:
    """Inputs and result of a recorded batch. They keep their place in memory."""

    roots: Roots
    table: Tensor
    """The target's pages of each row, int32 [B, M]."""
    chain: Tensor
    """int64 [B, n]"""


class CapturedChains:
    """Chains in batches of 1, 2, 4, ... rows, each size recorded when it is first needed. Rows that are left
    over write where nobody reads."""

    def __init__(
        self,
        parts: ChainParts,
        num_tokens: int,
        cross: Callable[[Tensor, Tensor], CrossAttention],
        record: Callable[[Work], Work],
    ) -> None:
        """`cross` attends over pages [B, M] as far as lengths, int32 [B], say; both change their content.
        `record` gives what does the same work again."""
        self._parts, self._num_tokens = parts, num_tokens
        self._cross, self._record = cross, record
        self._batches: dict[int, _Batch] = {}
        self._works: dict[int, tuple[Work, Work]] = {}

    def __call__(self, roots: Roots, table: Tensor) -> Tensor:
        """As `draft_chain`, for rows with these pages; the result stays until the next call."""
        count = len(roots.rows)
        size = 1 << (count - 1).bit_length()
        if size not in self._batches:
            self._batches[size] = self._empty(size, roots, table)
        batch = self._batches[size]
        goals = (*vars(batch.roots).values(), batch.table)
        for goal, given in zip(goals, (*vars(roots).values(), table), strict=True):
            goal[:count].copy_(given)
        batch.roots.rows[count:] = self._parts.ring.dump_row
        if size not in self._works:
            # Not before the inputs are there, because recording does the work as well. The work is kept,
            # because the recorded one uses its tensors.
            work = self._work(batch)
            self._works[size] = work, self._record(work)
        self._works[size][1]()
        return batch.chain[:count]

    def _empty(self, size: int, roots: Roots, table: Tensor) -> _Batch:
        ones = [value.new_ones(size, *value.shape[1:]) for value in vars(roots).values()]
        device = roots.rows.device
        chain = torch.zeros(size, self._num_tokens, dtype=torch.int64, device=device)
        return _Batch(Roots(*ones), table.new_zeros(size, table.shape[1]), chain)

    def _work(self, batch: _Batch) -> Work:
        lengths = batch.roots.positions.to(torch.int32)
        cross = self._cross(batch.table, lengths)

        def work() -> None:
            lengths.copy_(batch.roots.positions)
            batch.chain.copy_(draft_chain(self._parts, batch.roots, self._num_tokens, cross))

        return work
