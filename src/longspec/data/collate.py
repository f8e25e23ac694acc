"""Make the tensors of a training batch from packed sequences: tokens, documents, and which tokens count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from longspec.data.shards import Packed, Role
from longspec.errors import UserError, entry

Learnt = Callable[[NDArray[np.uint8], bool], NDArray[np.bool_]]
"""Takes the roles [T] and whether prompts are masked; returns which tokens may count [T]."""


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens."""

    tokens: torch.Tensor
    """[B, T] int64."""
    starts: torch.Tensor
    """[B, T] int64: for each token, where in its row its document starts."""
    learn: torch.Tensor
    """[B, T] bool: whether predicting this token counts. Padding and the first token of a document never
    count."""


def _base(roles: NDArray[np.uint8], mask_prompt: bool) -> NDArray[np.bool_]:
    """Plain text: everything counts."""
    if mask_prompt:
        raise UserError("the collator 'base' learns prompts too: use 'long' to mask them")
    return roles != Role.PAD


def _long(roles: NDArray[np.uint8], mask_prompt: bool) -> NDArray[np.bool_]:
    """Long documents: prompts count unless they are masked."""
    return roles > Role.PROMPT if mask_prompt else roles != Role.PAD


def _cot(roles: NDArray[np.uint8], mask_prompt: bool) -> NDArray[np.bool_]:
    """Chain of thought: reasoning and answers count, questions never, whatever `mask_prompt` says."""
    return roles > Role.PROMPT


COLLATORS: dict[str, Learnt] = {"base": _base, "long": _long, "cot": _cot}


def collate(sequences: Sequence[Packed], kind: str, mask_prompt: bool) -> Batch:
    """The batch of these sequences, which have equal lengths; `kind` is one of `COLLATORS`."""
    learnt = entry("collator", kind, COLLATORS)
    lengths = {len(one.tokens) for one in sequences}
    if len(lengths) != 1:
        raise UserError(f"a batch needs sequences of one length; these have {sorted(lengths) or 'none'}")
    starts = np.stack([_starts(one) for one in sequences])
    learn = np.stack([learnt(one.roles, mask_prompt) for one in sequences])
    learn &= starts != np.arange(starts.shape[1])
    tokens = np.stack([one.tokens for one in sequences]).astype(np.int64)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(starts), torch.from_numpy(learn))


def _starts(one: Packed) -> NDArray[np.int64]:
    """For each token of a sequence, where its document starts."""
    lengths = np.diff(one.starts, append=len(one.tokens))
    return np.repeat(one.starts.astype(np.int64), lengths)
