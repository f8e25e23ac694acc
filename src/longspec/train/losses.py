"""The loss over a large frozen head, chunk by chunk, so that the scores of all tokens never exist at once.

The head is frozen, so only the gradient by the hidden states is needed. It is known as soon as the scores of
a chunk are. So it is computed in the forward pass, and nothing of a chunk is kept.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# The bytes of fp32 scores at a time: small enough for a laptop, large enough to keep a GPU busy.
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**31}


class LossShares(NamedTuple):
    """The shares of the loss's parts; the rest is cross-entropy with the text."""

    soft: float = 0.0
    """Of the KL divergence from the target."""
    overlap: float = 0.0
    """Of the negative logarithm of the overlap, sum(min(p, q)): the chance that a token drawn from the draft
    is accepted."""


CROSS_ENTROPY = LossShares()
Chunk = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, LossShares], tuple[Tensor, Tensor]]
# torch's label of a query that does not count.
_IGNORED = -100


def one_chunk(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, log_p: Tensor | None, shares: LossShares
) -> tuple[Tensor, Tensor]:
    """The loss of some queries, each times its weight [m], and the gradient by their scores [m, V'].

    log_p [m, V'] are the soft targets.
    """
    soft, overlap = shares
    hard = 1 - soft - overlap
    log_q = F.log_softmax(score(hidden, head), -1)
    label_log_q = log_q.gather(1, labels[:, None])
    q = log_q.exp()
    loss = -hard * label_log_q[:, 0]
    by_score = (1 - overlap) * q
    if log_p is not None:
        p = log_p.exp()
        loss = loss + soft * (p * (log_p - log_q)).sum(-1)
        by_score = by_score - soft * p
        if overlap:
            common = torch.minimum(p, q).sum(-1, keepdim=True).clamp_min(1e-6)
            # Only where q is smaller does the overlap grow with it.
            growing = torch.where(q < p, q, 0.0)
            loss = loss - overlap * common[:, 0].log()
            by_score = by_score - overlap * (growing - q * growing.sum(-1, keepdim=True)) / common
    by_score = by_score.scatter_add(1, labels[:, None], label_log_q.new_full((len(labels), 1), -hard))
    return (loss * weights).sum(), (by_score * weights[:, None]).to(head.dtype)


def head_loss(
    hidden: Sequence[Tensor],
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    teacher: Tensor | None = None,
    shares: LossShares = CROSS_ENTROPY,
    chunk: Chunk = one_chunk,
) -> Tensor:
    """The loss, summed over L levels of M queries, in fp32.

    hidden, L times [M, E], are the draft's hidden states, head [V', E] is its part of the target's head, and
    labels [M] are rows of it. weights [L, M] tell how much each query counts. teacher [M, E] are the target's
    hidden states at the queries; their scores over the same rows are the soft targets. Only `hidden` gets a
    gradient. `chunk` is `one_chunk`, plain or compiled.
    """
    if any(shares) and teacher is None:
        raise ValueError("soft targets need the target's hidden states")
    if not any(shares) and len(labels) and head.is_cuda and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        # Liger takes no weights. All queries of a level that count have the same weight, so scale their sum.
        total = torch.zeros((), device=head.device)
        for states, weight in zip(hidden, weights, strict=True):
            counted = labels.masked_fill(weight == 0, _IGNORED)
            part = LigerFusedLinearCrossEntropyLoss(reduction="sum", ignore_index=_IGNORED)(
                head, states, counted
            )
            total = total + part * weight.max()
        return total
    soft = teacher if any(shares) else None
    loss: Tensor = _ChunkedLoss.apply(head, labels, weights, soft, shares, chunk, *hidden)  # type: ignore[no-untyped-call]
    return loss


def score(hidden: Tensor, head: Tensor) -> Tensor:
    """Scores [M, V'] in fp32 of hidden states [M, E]."""
    if hidden.dtype == torch.float32:
        return hidden @ head.T
    if hidden.is_cuda:
        return torch.mm(hidden, head.T, out_dtype=torch.float32)
    return (hidden @ head.T).float()


def chunk_rows(num_scores: int, device: torch.device) -> int:
    """For how many queries scores are computed at a time."""
    return max(64, CHUNK_BYTES.get(device.type, 2**26) // (4 * num_scores))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        teacher: Tensor | None,
        shares: LossShares,
        chunk: Chunk,
        *hidden: Tensor,
    ) -> Tensor:
        total = weights.new_zeros(())
        gradients = [torch.empty_like(states) for states in hidden]
        rows = chunk_rows(len(head), head.device)
        for start in range(0, len(labels), rows):
            part = slice(start, start + rows)
            # The soft targets are the same at every level.
            log_p = None if teacher is None else F.log_softmax(score(teacher[part], head), -1)
            for states, weight, gradient in zip(hidden, weights, gradients, strict=True):
                loss, by_score = chunk(states[part], head, labels[part], weight[part], log_p, shares)
                total += loss
                torch.mm(by_score, head, out=gradient[part])
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        scaled = (gradient * outputs[0].to(gradient.dtype) for gradient in ctx.saved_tensors)
        return *6 * (None,), *scaled
