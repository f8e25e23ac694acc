"""Attention written out: every score, one explicit mask. Slow, and what the other backends are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from longspec.attention.base import AttentionPlan


class ReferenceAttention:
    """Computes in `dtype` whatever the inputs are."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def fuses(self, x: Tensor) -> bool:
        """See `Attention.fuses`."""
        return False

    def plan(
        self,
        lengths: Tensor,
        num_new: int,
        tree: Tensor | None = None,
        sinks: int = 0,
        window: int | None = None,
    ) -> AttentionPlan:
        """See `Attention.plan`."""
        return AttentionPlan(lengths, num_new, tree, sinks, window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        T, S = plan.num_new, k.shape[2]
        tree = plan.tree
        if tree is None:
            tree = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
        sees = self._prefix_mask(T, S, plan)
        for row, length in enumerate(plan.host_lengths):
            sees[row, :, length : length + T] = tree if tree.ndim == 2 else tree[row]
        return self.masked(q, k, v, sees)

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """See `Attention.prefix`."""
        return self.masked(q, k, v, self._prefix_mask(q.shape[1], k.shape[2], plan))

    def _prefix_mask(self, num_queries: int, num_keys: int, plan: AttentionPlan) -> Tensor:
        """bool [B, T, S]"""
        entry = torch.arange(num_keys, device=plan.lengths.device)
        inside = entry < plan.lengths[:, None]
        if plan.window is not None:
            inside &= (entry < plan.sinks) | (entry >= plan.lengths[:, None] - plan.window)
        return inside[:, None].repeat(1, num_queries, 1)

    def masked(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention.masked`; a query that sees nothing gets 0 and lse -inf."""
        B, T, H, D = q.shape
        # Entries nobody sees may hold anything, nan included, which 0 * nan would let through.
        used = sees.any(1)[:, None, :, None]
        k, v = (torch.where(used, x, 0).to(self._dtype) for x in (k, v))
        grouped = q.to(self._dtype).view(B, T, k.shape[1], -1, D)
        scores = torch.einsum("btkgd,bksd->btkgs", grouped, k) / D**0.5
        scores = scores.masked_fill(~sees[:, :, None, None], -torch.inf)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        out = torch.einsum("btkgs,bksd->btkgd", weights, v)
        return out.reshape(B, T, H, D).to(q.dtype), lse.reshape(B, T, H).float()
