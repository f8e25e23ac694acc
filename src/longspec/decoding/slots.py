"""The state of each row on the device: one tensor of fixed size for each property."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from longspec.cache import DraftRing
from longspec.config import DraftConfig, ModelConfig
from longspec.decoding.choose import SamplingRows

# How many eos ids of a row the device checks; further ones are left to the host.
MOST_EOS = 16


@dataclass(frozen=True)
class Slots:
    """B rows. A sequence is admitted to one and released from it; rounds read and write the rest.

    A row's text ends with its root, the newest emitted token, at `text[row, lengths[row]]`; the KV of all
    tokens before it is in the pages.
    """

    lengths: Tensor
    """Tokens whose KV is in the pages, int64 [B]."""
    limits: Tensor
    """The length of text at which a row ends, int64 [B]."""
    seeds: Tensor
    """int64 [B]"""
    sampling: SamplingRows
    eos_ids: Tensor
    """Tokens that end a row, int64 [B, MOST_EOS]; -1 where there are fewer."""
    running: Tensor
    """bool [B]: whether the row's answer goes on; the device clears it at the row's limit or an eos."""
    active: Tensor
    """bool [B]: whether the next round is for this row; set by the host."""
    num_unread: Tensor
    """Tokens at the text's end, the root among them, that the draft has not read yet, int64 [B]."""
    feature: Tensor
    """The target's final hidden state at the newest token whose KV is in the pages, [B, E]."""
    tables: Tensor
    """The row's pages, int32 [B, M]; see `Pages`."""
    text: Tensor
    """int64 [B, S]"""
    found: Tensor
    """Working memory of the lookup kernels, int64 [B]; 0 between rounds."""
    report: Tensor
    """For the host, int64 [B, 1 + W]: how many tokens the last round emitted, and which."""
    ring: DraftRing | None

    @classmethod
    def empty(
        cls,
        target: ModelConfig,
        draft: DraftConfig | None,
        num_rows: int,
        num_tokens: int,
        num_pages: int,
        num_nodes: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Slots:
        """Rows with nothing in them: texts of `num_tokens` in `num_pages`, trees of `num_nodes`, rounds that
        emit `width` tokens at most."""

        def integers(*size: int) -> Tensor:
            return torch.zeros(num_rows, *size, dtype=torch.int64, device=device)

        return cls(
            lengths=integers(),
            limits=integers() + 1,
            seeds=integers(),
            sampling=SamplingRows.empty(num_rows, target.vocab_size, device),
            eos_ids=integers(MOST_EOS) - 1,
            running=integers().bool(),
            active=integers().bool(),
            num_unread=integers() + 1,
            feature=torch.zeros(num_rows, target.hidden_size, dtype=dtype, device=device),
            tables=integers(num_pages).int(),
            text=integers(num_tokens),
            found=integers(),
            report=integers(1 + width),
            ring=None
            if draft is None
            else DraftRing.empty(target, draft, num_rows, num_nodes, device, dtype),
        )

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def roots(self) -> Tensor:
        """The newest emitted token of each row, int64 [B]; its KV is not in the pages yet."""
        return self.text.gather(1, self.lengths[:, None])[:, 0]

    @property
    def seen(self) -> Tensor:
        return self.sampling.seen

    def first(self, num_rows: int) -> Slots:
        """The first rows, sharing the memory."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        cut = {name: part[:num_rows] for name, part in parts.items() if isinstance(part, Tensor)}
        ring = None if self.ring is None else self.ring.first(num_rows)
        return replace(self, **cut, sampling=self.sampling.first(num_rows), ring=ring)

    def move(self, source: int, goal: int) -> None:
        parts = [getattr(self, field.name) for field in fields(self)]
        for part in [part for part in parts if isinstance(part, Tensor)] + self.sampling.tensors():
            part[goal].copy_(part[source])
        if self.ring is not None:
            self.ring.move(source, goal)
