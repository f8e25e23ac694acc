"""Attention by our own Triton kernels, for the few queries of a decoding round."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from longspec.attention.base import AttentionPlan, copies_whole
from longspec.attention.torch_backend import TorchAttention
from longspec.kernels.attention import attend
from longspec.kernels.masked import masked

# As many as the largest tree has nodes. More are prefill, for which torch's FlashAttention is made.
MAX_QUERIES = 512


class TritonAttention:
    """Two launches a layer whatever the lengths, so a round can be captured in a CUDA graph.

    Prefill, and tensors that no kernel can reach (on the CPU, unless Triton's interpreter runs), are left
    to the torch backend.
    """

    def __init__(self) -> None:
        self._torch = TorchAttention()

    def fuses(self, x: Tensor) -> bool:
        """See `Attention.fuses`. Where gradients are wanted, the kernels have none."""
        return _reaches(x) and not torch.is_grad_enabled()

    def plan(
        self,
        lengths: Tensor,
        num_new: int,
        tree: Tensor | None = None,
        sinks: int = 0,
        window: int | None = None,
    ) -> AttentionPlan:
        """See `Attention.plan`. Reads nothing from the device."""
        if _covers(lengths, num_new):
            return AttentionPlan(lengths, num_new, tree, sinks, window)
        return self._torch.plan(lengths, num_new, tree, sinks, window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        if not _covers_heads(q):
            return self._torch.attend(q, k, v, plan)
        return attend(q, k, v, plan.lengths, plan.tree, True, plan.sinks, plan.window)

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """See `Attention.prefix`; also of several layers at once, as `attend` says."""
        if not _covers_heads(q):
            layers = zip(k, v, strict=True) if k.ndim == 5 else [(k, v)]
            queries = q.chunk(k.shape[0] if k.ndim == 5 else 1, 2)
            parts = [
                self._torch.prefix(one, *layer, plan) for one, layer in zip(queries, layers, strict=True)
            ]
            return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
        return attend(q, k, v, plan.lengths, None, False, plan.sinks, plan.window)

    def masked(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention.masked`."""
        if not _covers_heads(q):
            return self._torch.masked(q, k, v, sees)
        return masked(q, k, v, sees)


def _covers_heads(q: Tensor) -> bool:
    """Whether the kernels are for these queries [B, T, H, D]."""
    return _covers(q, q.shape[1]) and copies_whole(q.shape[3], q.dtype)


def _covers(x: Tensor, num_queries: int) -> bool:
    """Whether the kernels are for this."""
    return num_queries <= MAX_QUERIES and _reaches(x)


def _reaches(x: Tensor) -> bool:
    """Whether kernels can read x: on a GPU, or anywhere in the interpreter."""
    return x.is_cuda or bool(triton.knobs.runtime.interpret)
