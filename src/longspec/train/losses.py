"""The loss over a large frozen head, chunk by chunk, so that the scores of all tokens never exist at once.

The head is frozen, so only the gradient by the hidden states is needed. It is known as soon as the scores of
a chunk are. So it is computed in the forward pass, and nothing of a chunk is kept.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
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
Chunk = Callable[[Tensor, Tensor, Tensor, Tensor | None, LossShares], tuple[Tensor, Tensor]]


def one_chunk(
    hidden: Tensor, head: Tensor, labels: Tensor, teacher: Tensor | None, shares: LossShares
) -> tuple[Tensor, Tensor]:
    """The loss of some queries, and the gradient by their scores [m, V']."""
    soft, overlap = shares
    hard = 1 - soft - overlap
    log_q = F.log_softmax(score(hidden, head), -1)
    label_log_q = log_q.gather(1, labels[:, None])
    q = log_q.exp()
    loss = -hard * label_log_q.sum()
    by_score = (1 - overlap) * q
    if teacher is not None:
        log_p = F.log_softmax(score(teacher, head), -1)
        p = log_p.exp()
        loss = loss + soft * (p * (log_p - log_q)).sum()
        by_score = by_score - soft * p
        if overlap:
            common = torch.minimum(p, q).sum(-1, keepdim=True).clamp_min(1e-6)
            # Only where q is smaller does the overlap grow with it.
            growing = torch.where(q < p, q, 0.0)
            loss = loss - overlap * common.log().sum()
            by_score = by_score - overlap * (growing - q * growing.sum(-1, keepdim=True)) / common
    by_score = by_score.scatter_add(1, labels[:, None], label_log_q.new_full((len(labels), 1), -hard))
    return loss, by_score.to(head.dtype)


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    teacher: Tensor | None = None,
    shares: LossShares = CROSS_ENTROPY,
    chunk: Chunk = one_chunk,
) -> Tensor:
    """The loss, summed over M queries, in fp32.

    hidden [M, E] are the draft's hidden states, head [V', E] is its part of the target's head, and labels [M]
    are rows of it. teacher [M, E] are the target's hidden states at the queries; their scores over the same
    rows are the soft targets. Only `hidden` gets a gradient. `chunk` is `one_chunk`, plain or compiled.
    """
    if any(shares) and teacher is None:
        raise ValueError("soft targets need the target's hidden states")
    if not any(shares) and hidden.is_cuda and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return LigerFusedLinearCrossEntropyLoss(reduction="sum")(head, hidden, labels)
    loss: Tensor = _ChunkedLoss.apply(hidden, head, labels, teacher, shares, chunk)  # type: ignore[no-untyped-call]
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
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        teacher: Tensor | None,
        shares: LossShares,
        chunk: Chunk,
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(hidden)
        rows = chunk_rows(len(head), hidden.device)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            soft_part = None if teacher is None or not any(shares) else teacher[part]
            loss, by_score = chunk(hidden[part], head, labels[part], soft_part, shares)
            total += loss
            torch.mm(by_score, head, out=gradient[part])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0].to(gradient.dtype), *5 * (None,)
