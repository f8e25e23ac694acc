"""Rounds that return the target's probabilities, or choose only among the tokens that a constraint allows.

They are vanilla, because a constraint must know all tokens before the next one. They choose by the same
function as every other round: without a constraint the tokens are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspec.decoding.accept import Accepted
from longspec.decoding.round import Models, choose_rows, forward_chain_or_tree, settle
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree


def run_guided(models: Models, rows: Slots, sampled: bool, masks: Tensor | None, num_top: int) -> Tensor:
    """One round of the rows that are running and active; `rows.report` has what they emitted.

    Bit t of a row of `masks`, int32 [B, V / 32], says whether token t is allowed. Returns fp64
    [B, 1 + 2 * num_top]: the log-probability of each row's choice, the `num_top` most probable tokens, and
    their log-probabilities. They are the target's own, before sampling settings and constraint.
    """
    tree = TokenTree.chain(rows.roots[:, None])
    hidden = forward_chain_or_tree(models, rows, tree)
    logits = models.target.logits(hidden[:, 0], models.exact)
    allowed = logits if masks is None else logits.masked_fill(~unpack(masks, logits.shape[1]), -torch.inf)
    choice = choose_rows(models, rows, allowed, rows.lengths + 1, sampled, rows.sampling.seen)
    choice = models.target.agree(choice)
    zeros = torch.zeros_like(choice)
    settle(models.pages, rows, tree, hidden, Accepted(zeros[:, None], zeros, choice), accumulate=True)
    probable = logits.log_softmax(-1)
    top = probable.topk(min(num_top, logits.shape[1]), -1)
    parts = (probable.gather(1, choice[:, None]), top.indices, top.values)
    return torch.cat([part.double() for part in parts], 1)


def unpack(masks: Tensor, size: int) -> Tensor:
    """The bits of int32 masks [B, W], lowest first, as bool [B, size]."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return ((masks[:, :, None] >> bits) & 1).bool().flatten(1)[:, :size]
