"""The draft's own KV for the requests of a batch: a small ring for each, whatever the context."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from longspec.config import DraftConfig, ModelConfig

# torch's masked GPU kernel reads a row of the mask in groups of 16.
_ALIGNED = 16
# Not cuDNN's, which takes a tenth of a second to prepare for a new number of rows.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class BatchRing:
    """Keys and values of the draft's one layer. Position p of a row is at entry p % size.

    There is room for `num_nodes` more than the window. So a chain that is drafted behind a row's text does
    not overwrite what the row still sees, and needs no cleaning up when it is rejected.
    """

    def __init__(
        self,
        target: ModelConfig,
        draft: DraftConfig,
        num_rows: int,
        num_nodes: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.window = draft.window
        self.size = -(-(draft.window + num_nodes) // _ALIGNED) * _ALIGNED
        # One more row: what is not wanted is written there. Zero, because 0 times nan is nan.
        shape = (num_rows + 1, target.num_kv_heads, self.size, target.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self._entries = torch.arange(self.size, device=device)

    @property
    def dump_row(self) -> int:
        return len(self.keys) - 1

    def put(self, rows: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys and values [B, T, K, D] of tokens at `positions` [B, T] to `rows`, [B, T] or [B, 1]."""
        entries = positions % self.size
        self.keys[rows, :, entries] = k
        self.values[rows, :, entries] = v

    def attend(self, q: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """One query a row, [B, H, D] at `positions` [B]: each sees the last `window` positions of its row,
        its own among them."""
        (B, H, D), K = q.shape, self.keys.shape[1]
        back = (positions[:, None] - self._entries) % self.size
        sees = (back < self.window) & (back <= positions[:, None])
        # The query heads that share a KV head are queries of one problem, so keys are never repeated.
        sees = sees[:, None, None].expand(B, K, H // K, self.size)
        with sdpa_kernel(_BACKENDS):
            out = F.scaled_dot_product_attention(
                q.view(B, K, H // K, D), self.keys[rows], self.values[rows], sees
            )
        return out.reshape(B, H, D)


class RingRows:
    """Which row of the ring each request has, and how much of its text the draft has read."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[str, int] = {}
        self._num_read: dict[str, int] = {}

    def assign(self, requests: Sequence[str], alive: Collection[str]) -> list[int]:
        """A row for each of these requests. Requests that are not `alive` lose theirs, and where rows are
        short, those that are not in `requests` too."""
        for request in [request for request in self._rows if request not in alive]:
            self._release(request)
        asked = set(requests)
        for request in requests:
            if request in self._rows:
                continue
            if not self._free:
                self._release(next(other for other in self._rows if other not in asked))
            self._rows[request] = self._free.pop()
            self._num_read[request] = 0
        return [self._rows[request] for request in requests]

    def num_read(self, request: str, root: int) -> int:
        """How many tokens of a request's text are in its ring; `root` is the position of the newest one."""
        # More than there is: the text was replaced.
        return self._num_read[request] if self._num_read[request] <= root else 0

    def note_read(self, request: str, root: int) -> None:
        """Note that the ring now holds the request's text up to and including position `root`."""
        self._num_read[request] = root + 1

    def _release(self, request: str) -> None:
        self._free.append(self._rows.pop(request))
        del self._num_read[request]
