"""Attention on a CPU by our C code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.attention.base import AttentionPlan
from longspec.attention.torch_backend import TorchAttention
from longspec.native.build import Context, code

# Heads of whole vectors.
_HEAD_DIMS = range(16, 257, 16)


class NativeAttention(TorchAttention):
    """A query gets the same bits whatever is computed beside it: keys are added in the order of its text."""

    def covers(self, k: Tensor) -> bool:
        """Whether the C code attends to keys like k."""
        fits = k.dtype == torch.float32 and k.shape[-1] in _HEAD_DIMS and k.stride(-1) == 1
        return fits and k.device.type == "cpu"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        if not self.covers(k):
            return super().attend(q, k, v, plan)
        return _attend(q, Seen(k, v, plan.lengths, plan.num_new, plan.tree, plan))

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        if not self.covers(k):
            return super().prefix(q, k, v, plan)
        return _attend(q, Seen(k, v, plan.lengths, plan=plan))

    def masked(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        if not self.covers(k):
            return super().masked(q, k, v, sees)
        return _attend(q, Seen(k, v, None, k.shape[2], sees))

    def filled(self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        if not self.covers(k):
            return super().filled(q, k, v, counts)
        return _attend(q, Seen(k, v, counts))


@dataclass(frozen=True)
class Seen:
    """What the queries of each row see: the first `lengths` keys, and some of the next `own` ones.

    With a plan, the keys lie in its pages and are of one layer or several. Without one, each row has its own.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor | None
    own: int = 0
    sees: Tensor | None = None
    """Which of these keys each query sees; None: those up to its own."""
    plan: AttentionPlan | None = None

    def context(self, num_rows: int, num_queries: int, num_heads: int, query_stride: int) -> Context:
        """The same for the C code, and for queries of this layout."""
        k, v, plan, (lengths, sees) = self.k, self.v, self.plan, map(_contiguous, (self.lengths, self.sees))
        if v.stride() != k.stride() or k.stride()[-2:] != (k.shape[-1], 1):
            k, v = k.contiguous(), v.contiguous()
        context = Context(
            keys=k.data_ptr(),
            values=v.data_ptr(),
            head_stride=k.stride(-3),
            num_rows=num_rows,
            num_queries=num_queries,
            num_heads=num_heads,
            head_dim=k.shape[-1],
            num_layers=1,
            num_kv_heads=k.shape[-3],
            query_stride=query_stride,
            query_row_stride=num_queries * query_stride,
            lengths=None if lengths is None else lengths.data_ptr(),
            num_own=self.own,
            sees=None if sees is None else sees.data_ptr(),
            sees_stride=num_queries * self.own if sees is not None and sees.ndim == 3 else 0,
            window=-1,
        )
        context.kept = [k, v, lengths, sees]
        if plan is None:
            context.row_stride = k.stride(0)
            return context
        tables = plan.tables.contiguous()
        context.kept.append(tables)
        context.tables, context.num_pages = tables.data_ptr(), tables.shape[1]
        context.page_size = plan.page_size
        if k.ndim == 4:
            context.num_layers, context.layer_stride = k.shape[0], k.stride(0)
        if plan.window is not None:
            context.sinks, context.window = plan.sinks, plan.window
        return context


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _attend(q: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    B, T, H, D = q.shape
    if q.stride()[2:] != (D, 1):
        q = q.contiguous()
    context = seen.context(B, T, H, q.stride(1))
    context.query_row_stride = q.stride(0)
    out, lse = q.new_empty(B, T, H, D), q.new_empty(B, T, H)
    code().attend(context, q.data_ptr(), out.data_ptr(), lse.data_ptr(), torch.get_num_threads())
    return out, lse
