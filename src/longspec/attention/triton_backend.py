"""Attention by our own Triton kernels, for the few queries of a decoding round."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from longspec.attention.base import AttentionPlan, copies_whole
from longspec.attention.torch_backend import TorchAttention
from longspec.kernels.attention import attend
from longspec.kernels.merge import merge

# As many as the largest tree has nodes. More are prefill, for which libraries are faster.
MAX_QUERIES = 512


class TritonAttention(TorchAttention):
    """Two launches a layer whatever the lengths, so that a round can be captured in a CUDA graph.

    Long prompts, and tensors that no kernel can reach (on the CPU, unless Triton's interpreter runs), are
    left to torch.
    """

    def can_fuse(self, x: Tensor, head_dim: int) -> bool:
        """See `Attention.can_fuse`. Where gradients are wanted, the kernels have none."""
        reached = x.is_cuda or bool(triton.knobs.runtime.interpret)
        return reached and copies_whole(head_dim, x.dtype) and not torch.is_grad_enabled()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        if not self._covers(q):
            return super().attend(q, k, v, plan)
        tables, size = plan.tables, plan.page_size
        return attend(q, k, v, plan.lengths, tables, size, plan.tree, True, plan.sinks, plan.window)

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """See `Attention.prefix`."""
        if not self._covers(q):
            return super().prefix(q, k, v, plan)
        tables, size = plan.tables, plan.page_size
        return attend(q, k, v, plan.lengths, tables, size, None, False, plan.sinks, plan.window)

    def _merge(self, one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return merge(one, two) if self.can_fuse(one[0], one[0].shape[-1]) else super()._merge(one, two)

    def _covers(self, q: Tensor) -> bool:
        """Whether the kernels are for these queries [B, T, H, D]."""
        return q.shape[1] <= MAX_QUERIES and self.can_fuse(q, q.shape[3])
