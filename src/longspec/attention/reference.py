"""Attention with every score and one explicit mask. Slow: tests compare the other backends with it."""

from __future__ import annotations

import torch
from torch import Tensor

from longspec.attention.base import AttentionPlan, by_layer


class ReferenceAttention:
    """Computes in `dtype`, whatever the dtype of the inputs is."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def can_fuse(self, x: Tensor, head_dim: int) -> bool:
        return False

    def warm_up(self, q: Tensor, num_kv_heads: int, longest: int) -> None:
        pass

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        T, end = plan.num_new, max(plan.host_lengths) + plan.num_new
        tree = plan.tree
        if tree is None:
            tree = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
        sees = self._prefix_mask(T, end, plan)
        for row, length in enumerate(plan.host_lengths):
            sees[row, :, length : length + T] = tree if tree.ndim == 2 else tree[row]
        return self.masked(q, self._rows(k, end, plan), self._rows(v, end, plan), sees)

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        if k.ndim == 4:
            return by_layer(self, q, k, v, plan)
        end = max(plan.host_lengths)
        sees = self._prefix_mask(q.shape[1], end, plan)
        return self.masked(q, self._rows(k, end, plan), self._rows(v, end, plan), sees)

    def filled(self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        sees = torch.arange(k.shape[2], device=q.device) < counts[:, None]
        return self.masked(q, k, v, sees[:, None].expand(-1, q.shape[1], -1))

    def _rows(self, x: Tensor, end: int, plan: AttentionPlan) -> Tensor:
        """The first `end` entries of every row, [B, K, end, D]; entries past a row's pages are arbitrary."""
        entries = torch.arange(end, device=x.device)
        pages = plan.tables[:, entries // plan.page_size].long()
        return x[:, pages * plan.page_size + entries % plan.page_size].transpose(0, 1)

    def _prefix_mask(self, num_queries: int, num_keys: int, plan: AttentionPlan) -> Tensor:
        """Which keys each query sees, bool [B, T, S]."""
        entry = torch.arange(num_keys, device=plan.lengths.device)
        inside = entry < plan.lengths[:, None]
        if plan.window is not None:
            inside &= (entry < plan.sinks) | (entry >= plan.lengths[:, None] - plan.window)
        return inside[:, None].repeat(1, num_queries, 1)

    def masked(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        """As in every backend, but a query may see nothing: it gets 0 and lse -inf."""
        B, T, H, D = q.shape
        # Entries that no query sees may hold nan, and 0 * nan is nan.
        used = sees.any(1)[:, None, :, None]
        k, v = (torch.where(used, x, 0).to(self._dtype) for x in (k, v))
        grouped = q.to(self._dtype).view(B, T, k.shape[1], -1, D)
        scores = torch.einsum("btkgd,bksd->btkgs", grouped, k) / D**0.5
        scores = scores.masked_fill(~sees[:, :, None, None], -torch.inf)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        out = torch.einsum("btkgs,bksd->btkgd", weights, v)
        return out.reshape(B, T, H, D).to(q.dtype), lse.reshape(B, T, H).float()
