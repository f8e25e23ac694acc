"""Rotary position embedding, with the scaled variants of long-context models."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor, nn

from longspec.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position for each of the head_dim / 2 rotated pairs, fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


def amplitude(rope: RopeConfig) -> float:
    """The factor of cos and sin: 1, except for yarn, which sharpens attention a little."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Divide slow frequencies by `factor`, keep fast ones, and blend those in between."""
    turns = rope.original_length * plain / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """As llama3, but the blend is linear in the index of the pair, not in its frequency."""

    def pair_with(turns: float) -> float:
        wave = rope.original_length / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    stretch = ((index - first) / (last - first)).clamp(0, 1)
    return (1 - stretch) * plain + stretch * plain / rope.factor


class RopeTable(nn.Module):
    """cos and sin for positions 0..capacity-1, in fp32 and laid out for `rotate`."""

    table: Tensor
    """cos and sin, [2, capacity, D]: one tensor, so that another thread always sees a matching pair."""
    # An attribute of the class, because a lock cannot be copied or pickled with a model.
    _growing = threading.Lock()

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self._rope, self._head_dim = rope, head_dim
        self.register_buffer("table", torch.empty(2, 0, head_dim), persistent=False)

    def reserve(self, capacity: int) -> None:
        """Grow the table to positions below `capacity`, if it is smaller."""
        if self.table.shape[1] >= capacity:
            return
        # Autograd could not use a table that was made in inference mode.
        with self._growing, torch.inference_mode(False), torch.no_grad():
            if self.table.shape[1] >= capacity:
                return
            frequencies = inverse_frequencies(self._rope, self._head_dim)
            angles = torch.outer(torch.arange(capacity, dtype=torch.float32), frequencies)
            cos, sin = angles.cos() * amplitude(self._rope), angles.sin() * amplitude(self._rope)
            # The table holds the sign of the rotation, so that `rotate` takes only three operations.
            table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
            self.table = table.to(self.table.device)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the tables for `positions` [B, T], as [B, T, 1, D]."""
        cos, sin = self.table[:, positions].unsqueeze(3)
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads x [B, T, heads, D]; computed in fp32, returned in x's dtype."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)
