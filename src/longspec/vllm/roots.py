"""Where the chains of a step begin, from the texts of its requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspec.vllm.chain import ChainParts, Roots, read_text
from longspec.vllm.ring import RingRows

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class DraftedRequests:
    """The requests that get a chain in this step."""

    names: Sequence[str]
    texts: Sequence[np.ndarray[Any, Any]]
    """The tokens of each; there may be anything behind the newest one."""
    positions: Sequence[int]
    """Of the newest tokens, the roots."""
    feature: Tensor
    """The target's final hidden state at the token before each root, [B, E]."""


def find_roots(
    parts: ChainParts, rows: RingRows, drafted: DraftedRequests, alive: Collection[str], num_tokens: int
) -> Roots:
    """The roots for chains of `num_tokens`, with as many tokens before them as the last round may have kept.

    Where the ring lacks more, after a prompt or after a prefix that was found in the cache, it is read here.
    """
    places = rows.assign(drafted.names, alive)
    device, width = parts.ring.keys.device, num_tokens + 1
    numbers = []
    for name, row, text, root in zip(drafted.names, places, drafted.texts, drafted.positions, strict=True):
        first = max(rows.num_read(name, root), root - parts.ring.window + 1)
        if root + 1 - first > width:
            unread = torch.from_numpy(text[first:root].astype("int64"))
            read_text(parts, row, unread.to(device), first)
            first = root
        before = [int(text[max(root - back, 0)]) for back in range(width)]
        numbers.append([row, root, root + 1 - first, *before])
        rows.note_read(name, root)
    whole = torch.tensor(numbers).to(device)  # in one copy
    return Roots(whole[:, 0], whole[:, 1], whole[:, 3:], whole[:, 2], drafted.feature)
