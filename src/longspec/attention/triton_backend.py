"""Attention with our own Triton kernels, for the few queries of a decoding round."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from longspec.attention.base import AttentionPlan, copies_whole
from longspec.attention.torch_backend import TorchAttention
from longspec.kernels.attention import attend
from longspec.kernels.exact import attend_exactly
from longspec.kernels.merge import merge

# The number of nodes of the largest tree. More queries than that are a prefill, where libraries are faster.
MAX_QUERIES = 512


class TritonAttention(TorchAttention):
    """Two launches per layer, whatever the lengths are, so a CUDA graph can capture a round.

    Torch's kernels compute long prompts, and tensors on the CPU (unless Triton's interpreter runs).
    """

    def can_fuse(self, x: Tensor, head_dim: int) -> bool:
        """Not where gradients are needed, because the kernels have no backward pass."""
        reached = x.is_cuda or bool(triton.knobs.runtime.interpret)
        return reached and copies_whole(head_dim, x.dtype) and not torch.is_grad_enabled()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        if not self._covers(q):
            return super().attend(q, k, v, plan)
        tables, size = plan.tables, plan.page_size
        if plan.paths is not None:
            return attend_exactly(q, k, v, plan.lengths, tables, size, plan.paths)
        return attend(q, k, v, plan.lengths, tables, size, plan.tree, True, plan.sinks, plan.window)

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        if not self._covers(q):
            return super().prefix(q, k, v, plan)
        tables, size = plan.tables, plan.page_size
        return attend(q, k, v, plan.lengths, tables, size, None, False, plan.sinks, plan.window)

    def _merge(self, one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return merge(one, two) if self.can_fuse(one[0], one[0].shape[-1]) else super()._merge(one, two)

    def _covers(self, q: Tensor) -> bool:
        """Whether our kernels compute these queries [B, T, H, D]."""
        return q.shape[1] <= MAX_QUERIES and self.can_fuse(q, q.shape[3])
