"""What every attention backend offers, and how partial results combine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from longspec.errors import UserError

BACKENDS = ("torch", "triton", "reference")


@dataclass(frozen=True)
class AttentionPlan:
    """What one forward pass asks of attention; made once, used by every layer."""

    lengths: Tensor
    """Entries of each row's prefix, int64 [B]."""
    num_new: int
    """T, the queries per row; their keys stand right behind the prefix."""
    tree: Tensor | None
    """Which new tokens each new token sees, bool [T, T] or [B, T, T]; None for a causal chain."""
    sinks: int = 0
    window: int | None = None
    """With a window, of the prefix only its first `sinks` entries and its last `window` ones are seen."""

    @cached_property
    def host_lengths(self) -> tuple[int, ...]:
        """`lengths` again, for backends whose shapes follow them; waits for the device, once."""
        return tuple(self.lengths.tolist())

    def ranges(self, row: int) -> list[tuple[int, int]]:
        """The parts of a row's prefix that are seen, none of them empty."""
        length = self.host_lengths[row]
        if self.window is None or self.sinks + self.window >= length:
            return [(0, length)] if length else []
        parts = ((0, self.sinks), (length - self.window, length))
        return [(start, end) for start, end in parts if start < end]


class Attention(Protocol):
    """A backend. Queries are [B, T, H, D], a layer's cache is [B, K, S, D].

    Results are `out` [B, T, H, D] in the queries' type and `lse` [B, T, H] in fp32, the log of the sum of
    the exponentiated scores, so that results over disjoint keys can be merged exactly.
    """

    def fuses(self, x: Tensor) -> bool:
        """Whether the small work around attention on x is for our own kernels as well."""
        ...

    def plan(
        self,
        lengths: Tensor,
        num_new: int,
        tree: Tensor | None = None,
        sinks: int = 0,
        window: int | None = None,
    ) -> AttentionPlan:
        """Prepare for one forward pass."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Each query sees the prefix, and of the new tokens those that the plan lets it see."""
        ...

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Each query sees the prefix and nothing else; an empty prefix gives 0 and lse -inf."""
        ...

    def masked(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        """Each query sees the keys that `sees`, bool [B, T, S], allows it: one at least."""
        ...


def copies_whole(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether our kernels are for such heads: they copy keys and values by 16 bytes."""
    return head_dim * dtype.itemsize % 16 == 0


def merge(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys. A side that saw nothing has weight 0."""
    (out_one, lse_one), (out_two, lse_two) = one, two
    lse = torch.logaddexp(lse_one, lse_two)
    # Where both sides saw nothing lse is -inf and the weights would be nan: they are 0 there.
    base = lse.masked_fill(lse == -torch.inf, 0.0)
    weight_one = torch.exp(lse_one - base).unsqueeze(-1)
    weight_two = torch.exp(lse_two - base).unsqueeze(-1)
    out = out_one.float() * weight_one + out_two.float() * weight_two
    return out.to(out_one.dtype), lse


def choose_backend(name: str = "auto") -> Attention:
    """The backend called `name`; `auto` is our kernels where there is a GPU for them, or torch's own."""
    if name not in ("auto", *BACKENDS):
        raise UserError(f"attention backend {name!r} is unknown; there are: auto, {', '.join(BACKENDS)}")
    if name == "reference":
        from longspec.attention.reference import ReferenceAttention

        return ReferenceAttention()
    if name == "triton" or (name == "auto" and _has_gpu_for_kernels()):
        if find_spec("triton") is None:
            raise UserError("attention backend 'triton' needs the package triton: pip install triton")
        from longspec.attention.triton_backend import TritonAttention

        return TritonAttention()
    from longspec.attention.torch_backend import TorchAttention

    return TorchAttention()


def _has_gpu_for_kernels() -> bool:
    # Older GPUs than Ampere know no bf16.
    found = torch.cuda.is_available() and torch.version.hip is None and find_spec("triton") is not None
    return found and torch.cuda.get_device_capability() >= (8, 0)
