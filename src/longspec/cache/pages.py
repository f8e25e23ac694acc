"""The target's KV in pages: one allocation for all sequences, with methods that write and move entries."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.config import ModelConfig

# The dump page belongs to no sequence. Unassigned table entries point to it, and so do writes to discard.
DUMP = 0


@dataclass(frozen=True)
class Pages:
    """Keys and values of every layer, in pages that lie end to end.

    A row finds its entries with a table of pages: entry e is at `tables[row, e // size] * size + e % size`.
    Consecutive pages are one slice, so a row that has such pages is read without a copy.
    """

    keys: Tensor
    """[L, K, S, D], S entries in all"""
    values: Tensor
    size: int
    """Entries of a page."""

    @classmethod
    def empty(
        cls, config: ModelConfig, num_pages: int, size: int, device: torch.device, dtype: torch.dtype
    ) -> Pages:
        """`num_pages` pages and the dump page, filled with zeros: masked entries are multiplied by 0, and
        0 times nan would be nan."""
        shape = (config.num_layers, config.num_kv_heads, (num_pages + 1) * size, config.head_dim)
        keys, values = (_zeros(shape, device, dtype) for _ in range(2))
        return cls(keys, values, size)

    @property
    def num_layers(self) -> int:
        return self.keys.shape[0]

    @property
    def num_pages(self) -> int:
        """Pages for sequences: all but the dump page."""
        return self.keys.shape[2] // self.size - 1

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [K, S, D] each."""
        return self.keys[layer], self.values[layer]

    def places(self, tables: Tensor, entries: Tensor) -> Tensor:
        """The index in S of each row's `entries` [B, T], int64 [B, T]."""
        pages = tables.gather(1, entries // self.size)
        return pages.long() * self.size + entries % self.size

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys and values [B, T, K, D] of one layer to `places` [B, T]."""
        flat = places.flatten()
        self.keys[layer].index_copy_(1, flat, k.flatten(0, 1).transpose(0, 1))
        self.values[layer].index_copy_(1, flat, v.flatten(0, 1).transpose(0, 1))

    def commit(self, tables: Tensor, lengths: Tensor, path: Tensor, num_kept: Tensor) -> None:
        """Move the keys and values of the nodes in `path` [B, P] to the end of the rows' prefixes.

        Only the first `num_kept` [B] nodes of a row move. Node numbers rise along a path, so entry i of a
        path is node i or a later one. The lengths are not changed.
        """
        steps = torch.arange(path.shape[1], device=path.device)
        kept = steps < num_kept[:, None]
        goal = self.places(tables, lengths[:, None] + steps)
        source = self.places(tables, lengths[:, None] + torch.where(kept, path, steps))
        for buffer in (self.keys, self.values):
            buffer[:, :, goal.flatten()] = buffer[:, :, source.flatten()]


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros. On a CPU from mmap, which uses no memory before something is written; `torch.zeros` writes."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)
