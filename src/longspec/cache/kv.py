"""The target's KV cache: fixed buffers, a length per row, and verbs that move what is in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.config import ModelConfig

Slots = tuple[Tensor, Tensor]
"""Row indices [B, 1] and entry indices [B, T] of places in a cache."""


@dataclass
class KVCache:
    """Keys and values of every layer for B rows.

    A row's first `lengths[row]` entries are its prefix. New entries are written past it and count only
    once `advance` or `commit` says so, which is what lets a rejected draft leave no trace.
    """

    keys: Tensor
    """[L, B, K, S, D]"""
    values: Tensor
    lengths: Tensor
    """int64 [B], on the cache's device"""

    @classmethod
    def empty(
        cls, config: ModelConfig, num_rows: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> KVCache:
        """Buffers for `capacity` entries per row. Untouched pages cost nothing on a CPU."""
        shape = (config.num_layers, num_rows, config.num_kv_heads, capacity, config.head_dim)
        return cls(
            torch.empty(shape, device=device, dtype=dtype),
            torch.empty(shape, device=device, dtype=dtype),
            torch.zeros(num_rows, device=device, dtype=torch.int64),
        )

    @property
    def num_rows(self) -> int:
        """B."""
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """Entries per row."""
        return self.keys.shape[3]

    @property
    def num_bytes(self) -> int:
        """Size of the buffers."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [B, K, S, D] each."""
        return self.keys[layer], self.values[layer]

    def row(self, row: int) -> KVCache:
        """One row as a cache of its own; it shares the buffers and the length."""
        one = slice(row, row + 1)
        return KVCache(self.keys[:, one], self.values[:, one], self.lengths[one])

    def slots(self, num_new: int) -> Slots:
        """The places of the next `num_new` entries of each row, right behind its prefix."""
        return self._behind_prefix(torch.arange(num_new, device=self.lengths.device))

    def write(self, layer: int, slots: Slots, k: Tensor, v: Tensor) -> None:
        """Put keys and values [B, T, K, D] of one layer into `slots`."""
        rows, entries = slots
        self.keys[layer][rows, :, entries] = k
        self.values[layer][rows, :, entries] = v

    def advance(self, num_new: Tensor | int) -> None:
        """Count the next `num_new` written entries of each row as prefix."""
        self.lengths += num_new

    def commit(self, path: Tensor, num_kept: Tensor, fused: bool = False) -> None:
        """Keep `num_kept` [B] of the entries written past the prefix: those at `path` [B, P], in order.

        A path names nodes by their place in what was written, each at or behind its place in the path,
        as a path through a tree does. Entries of the path past `num_kept` may hold any valid node.
        `fused` does it for all layers by one kernel.
        """
        if fused:
            from longspec.kernels.commit import commit_path

            commit_path(self.keys, self.values, self.lengths, path, num_kept)
        else:
            rows, source = self._behind_prefix(path)
            _, goal = self.slots(path.shape[1])
            for buffer in (self.keys, self.values):
                buffer[:, rows, :, goal] = buffer[:, rows, :, source]
        self.advance(num_kept)

    def truncate(self, lengths: Tensor) -> None:
        """Forget all but the first `lengths` [B] entries of each row."""
        self.lengths.copy_(torch.minimum(self.lengths, lengths.to(self.lengths)))

    def grown(self, capacity: int) -> KVCache:
        """This cache with more room; what was in it is copied."""
        shape = (*self.keys.shape[:3], capacity, self.keys.shape[4])
        bigger = KVCache(self.keys.new_empty(shape), self.values.new_empty(shape), self.lengths.clone())
        used = int(self.lengths.max())
        bigger.keys[:, :, :, :used] = self.keys[:, :, :, :used]
        bigger.values[:, :, :, :used] = self.values[:, :, :, :used]
        return bigger

    def _behind_prefix(self, offsets: Tensor) -> Slots:
        """The places `offsets` [T] or [B, T] behind each row's prefix."""
        rows = torch.arange(self.num_rows, device=self.lengths.device)[:, None]
        return rows, self.lengths[:, None] + offsets
