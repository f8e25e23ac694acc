"""The draft's own KV: a ring of the last positions. Its size does not depend on the context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.config import DraftConfig, ModelConfig


@dataclass(frozen=True)
class DraftRing:
    """Keys and values of the draft's one layer for B rows.

    The first `window` entries are the ring: position p is at entry p % window. After it there is room for the
    nodes of one tree. The last entry is the dump entry: what is written there is discarded.
    """

    keys: Tensor
    """[B, K, window + N + 1, D]"""
    values: Tensor
    positions: Tensor
    """The position that each entry of the ring holds, int64 [B, window + N + 1]; -1 if empty or not ring."""
    window: int

    @classmethod
    def empty(
        cls,
        target: ModelConfig,
        draft: DraftConfig,
        num_rows: int,
        num_nodes: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> DraftRing:
        """An empty ring, with room for trees of `num_nodes`."""
        num_entries = draft.window + num_nodes + 1
        # Zero, because masked entries are multiplied by 0, and 0 times nan is nan. Heads come first in
        # memory, so that `flat` can view the entries of all rows as one buffer.
        shape = (target.num_kv_heads, num_rows, num_entries, target.head_dim)
        keys, values = (torch.zeros(shape, device=device, dtype=dtype).transpose(0, 1) for _ in range(2))
        positions = torch.full((num_rows, num_entries), -1, device=device)
        return cls(keys, values, positions, draft.window)

    @staticmethod
    def size_of(target: ModelConfig, draft: DraftConfig, num_nodes: int, dtype: torch.dtype) -> int:
        """The bytes that `empty` allocates for one row."""
        entries = draft.window + num_nodes + 1
        return entries * (2 * target.num_kv_heads * target.head_dim * dtype.itemsize + 8)

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size() + 8 * self.positions.numel()

    @property
    def flat(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all rows, each as [K, B * (window + N + 1), D]."""
        keys, values = self.keys.transpose(0, 1), self.values.transpose(0, 1)
        return keys.flatten(1, 2), values.flatten(1, 2)

    def claim(self, positions: Tensor, wanted: Tensor) -> Tensor:
        """Reserve entries [B, T] for committed tokens at `positions` [B, T]; `put` then writes their KV.

        Tokens that are not `wanted` [B, T] get the dump entry.
        """
        entries = torch.where(wanted, positions % self.window, self.keys.shape[2] - 1)
        self.positions.scatter_(1, entries, torch.where(wanted, positions, -1))
        return entries

    def put(self, entries: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys and values [B, T, K, D] to claimed entries."""
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        self.keys[rows, :, entries] = k
        self.values[rows, :, entries] = v

    def get(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values [B, T, K, D] at `entries` [B, T]."""
        rows = torch.arange(entries.shape[0], device=entries.device)[:, None]
        return self.keys[rows, :, entries], self.values[rows, :, entries]

    def put_nodes(self, first: int, k: Tensor, v: Tensor) -> None:
        """Write keys and values [B, T, K, D] of the tree's nodes first, first + 1, ... after the ring."""
        place = slice(self.window + first, self.window + first + k.shape[1])
        self.keys[:, :, place] = k.transpose(1, 2)
        self.values[:, :, place] = v.transpose(1, 2)

    def sees(self, positions: Tensor, nodes: Tensor | None = None) -> Tensor:
        """Which entries queries at `positions` [B, T] see, bool [B, T, window + N + 1].

        They see ring entries less than `window` positions back, and the nodes that `nodes` [B, T, n] allows.
        """
        held = self.positions[:, None]
        distance = positions[:, :, None] - held
        sees = (held >= 0) & (distance >= 0) & (distance < self.window)
        if nodes is not None:
            sees[:, :, self.window : self.window + nodes.shape[2]] = nodes
        return sees

    def first(self, num_rows: int) -> DraftRing:
        return DraftRing(self.keys[:num_rows], self.values[:num_rows], self.positions[:num_rows], self.window)

    def move(self, source: int, goal: int) -> None:
        for part in (self.keys, self.values, self.positions):
            part[goal].copy_(part[source])
