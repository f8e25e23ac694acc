"""Causal attention within the pieces of packed sequences, with gradients, for training.

It uses flash attention with variable lengths if torch has it for the dtype and device. Otherwise it works
piece by piece, and cuts long windowed pieces into blocks of the window's size. It builds a mask only for
pieces with fewer queries than keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

# Empty pieces round the number of pieces up to a multiple of this, so that few different shapes occur.
_ROUND = 64


@dataclass(frozen=True)
class Pieces:
    """Pieces of tokens that are laid end to end; pieces do not see each other."""

    starts: tuple[int, ...]
    """Where each piece starts: 0 first, then rising."""
    num_tokens: int
    """Of all pieces; of a packed batch B * T."""
    most: int
    """No piece is longer than this."""
    device: torch.device

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return list(zip(self.starts, (*self.starts[1:], self.num_tokens), strict=True))

    @cached_property
    def cumulative(self) -> Tensor:
        """The bounds for flash attention, int32, with empty pieces at the end."""
        padding = [self.num_tokens] * (-len(self.starts) % _ROUND + 1)
        return torch.tensor([*self.starts, *padding], dtype=torch.int32).to(self.device, non_blocking=True)

    @property
    def equal(self) -> int | None:
        """The length of the pieces if all have the same length, else None."""
        lengths = {end - start for start, end in self.bounds}
        return lengths.pop() if len(lengths) == 1 else None


def attend_packed(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, window: int | None = None) -> Tensor:
    """Queries [B, T, H, D] over keys and values [B, T, K, D]; returns [B, T, H, D].

    A query sees the keys of its own piece up to its own position; with a `window`, only the last `window` of
    them.
    """
    out = attend_ends(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), pieces, pieces, window)
    return out.view(q.shape)


def attend_ends(
    q: Tensor, k: Tensor, v: Tensor, queries: Pieces, keys: Pieces, window: int | None = None
) -> Tensor:
    """Queries [R, H, D] over keys and values [S, K, D], which have as many pieces, none of them empty.

    The last query of a piece sees all of its keys, the query before it one less, and so on. A piece has no
    fewer keys than queries.
    """
    has_flash = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    return (_flash if has_flash else _by_piece)(q, k, v, queries, keys, window)


def _flash(q: Tensor, k: Tensor, v: Tensor, queries: Pieces, keys: Pieces, window: int | None) -> Tensor:
    limits = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    return torch.ops.aten._flash_attention_forward(
        q, k, v, queries.cumulative, keys.cumulative, queries.most, keys.most, 0.0, True, False, **limits
    )[0]


def _by_piece(q: Tensor, k: Tensor, v: Tensor, queries: Pieces, keys: Pieces, window: int | None) -> Tensor:
    length = queries.equal
    if length is not None and keys.equal == length:
        size = (-1, length)
        out = _causal(q.unflatten(0, size), k.unflatten(0, size), v.unflatten(0, size), window)
        return out.flatten(0, 1)
    outs = [
        _causal(q[None, slice(*asked)], k[None, slice(*seen)], v[None, slice(*seen)], window)[0]
        for asked, seen in zip(queries.bounds, keys.bounds, strict=True)
    ]
    return torch.cat(outs)


def _causal(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Queries [P, n, H, D] over keys [P, S, K, D] of P pieces that have the same lengths."""
    n, S = q.shape[1], k.shape[1]
    if n < S:
        return _attend(q, k, v, mask=torch.ones(n, S, dtype=torch.bool, device=q.device).tril(S - n))
    if window is not None and n > window:
        return _windowed(q, k, v, window)
    return _attend(q, k, v, causal=True)


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend in blocks of `window` queries, each over its own block of keys and the block before it."""
    P, n, _, D = q.shape
    count = -(-n // window)

    def blocks(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, 0, count * window - n)).view(P, count, window, -1, D)

    def with_previous(x: Tensor) -> Tensor:
        own = blocks(x)
        before = F.pad(own, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
        return torch.cat((before, own), 2).flatten(0, 1)

    place = torch.arange(window, device=q.device)
    distance = (place + window)[:, None] - torch.arange(2 * window, device=q.device)
    sees = ((distance >= 0) & (distance < window)).expand(count, -1, -1).clone()
    sees[0, :, :window] = False  # the first block has none before it
    mask = sees.repeat(P, 1, 1)[:, None]
    out = _attend(blocks(q).flatten(0, 1), with_previous(k), with_previous(v), mask=mask)
    return out.reshape(P, count * window, -1, D)[:, :n]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)
