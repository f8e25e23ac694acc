"""What every attention backend offers, and how partial results combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from longspec.errors import UserError, check_known

if TYPE_CHECKING:
    from longspec.kernels.exact import Paths

BACKENDS = ("torch", "native", "triton", "reference")


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What one forward pass asks of attention; made once, used by every layer."""

    lengths: Tensor
    """Entries of each row's prefix, int64 [B]."""
    tables: Tensor
    """The pages of each row, int32 [B, M]; see `Pages`."""
    page_size: int
    num_new: int
    """T, the queries per row; their keys follow the prefix directly."""
    tree: Tensor | None = None
    """Which new tokens each new token sees, bool [T, T] or [B, T, T]; None for a causal chain."""
    sinks: int = 0
    window: int | None = None
    """With a window, a query sees only the first `sinks` and the last `window` entries of the prefix."""
    paths: Paths | None = None
    """With these, a query gets the same bits whatever is computed beside it; see `longspec.kernels.exact`."""
    known: tuple[Sequence[int], Sequence[Sequence[int]]] | None = None
    """Lengths and tables, if the host knows them. To read them from a GPU, the host would have to wait."""
    masks: dict[int, Tensor] = field(default_factory=dict)
    """The mask of each row: a backend makes it at the first layer and reuses it at the others."""
    cuts: dict[tuple[int, int, int], list[slice]] = field(default_factory=dict)
    """The results of `runs`, kept for the other layers."""

    @cached_property
    def host_lengths(self) -> Sequence[int]:
        """`lengths` on the host, for backends whose shapes depend on them."""
        return self.known[0] if self.known else self.lengths.tolist()

    @cached_property
    def _host_tables(self) -> Sequence[Sequence[int]]:
        if self.known:
            return self.known[1]
        used = -(-(max(self.host_lengths) + self.num_new) // self.page_size)
        found: list[list[int]] = self.tables[:, :used].tolist()
        return found

    def ranges(self, row: int) -> list[tuple[int, int]]:
        """The parts of a row's prefix that its queries see. No part is empty."""
        length = self.host_lengths[row]
        if self.window is None or self.sinks + self.window >= length:
            return [(0, length)] if length else []
        parts = ((0, self.sinks), (length - self.window, length))
        return [(start, end) for start, end in parts if start < end]

    def runs(self, row: int, start: int, end: int) -> list[slice]:
        """Where a row's entries `start` to `end` (exclusive) are among all pages: one slice for each run of
        consecutive pages."""
        if (row, start, end) in self.cuts:
            return self.cuts[row, start, end]
        size, table = self.page_size, self._host_tables[row]
        found: list[list[int]] = []
        for index in range(start // size, -(-end // size)):
            first = table[index] * size
            begin = first + max(start - index * size, 0)
            stop = first + min(end - index * size, size)
            if found and found[-1][1] == begin:
                found[-1][1] = stop
            else:
                found.append([begin, stop])
        self.cuts[row, start, end] = [slice(*run) for run in found]
        return self.cuts[row, start, end]


class Attention(Protocol):
    """A backend. Queries are [B, T, H, D]; a layer's keys and values are [K, S, D], all pages end to end.

    Results are `out` [B, T, H, D] in the queries' dtype and `lse` [B, T, H] in fp32: the log of the sum of
    the exponentiated scores. With it, results over disjoint keys can be merged exactly.
    """

    def can_fuse(self, x: Tensor, head_dim: int) -> bool:
        """Whether our own kernels can run a whole round on tensors like x with heads of this size."""
        ...

    def warm_up(self, q: Tensor, num_kv_heads: int, longest: int) -> None:
        """Prepare for prompts of up to `longest` tokens, so that the first prompt does not have to wait."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Each query sees the prefix and those new tokens that the plan allows."""
        ...

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Each query sees only the prefix; an empty prefix gives 0 and lse -inf.

        k and v may hold several layers, [C, K, S, D]. Then the first H / C of the H heads attend to the first
        layer, the next H / C to the second, and so on.
        """
        ...

    def masked(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        """Each query sees those of its row's keys [B, K, S, D] that `sees`, bool [B, T, S], allows: at least
        one."""
        ...

    def filled(self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Each query sees the first `counts` [B] of its row's keys [B, K, S, D]: at least one."""
        ...


def copies_whole(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether our kernels support such heads: they copy keys and values in units of 16 bytes."""
    return head_dim * dtype.itemsize % 16 == 0


def merge(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys. A side that saw nothing has weight 0."""
    (out_one, lse_one), (out_two, lse_two) = one, two
    lse = torch.logaddexp(lse_one, lse_two)
    # If both sides saw nothing, lse is -inf and the weights would be nan. Make them 0.
    base = lse.masked_fill(lse == -torch.inf, 0.0)
    weight_one = torch.exp(lse_one - base).unsqueeze(-1)
    weight_two = torch.exp(lse_two - base).unsqueeze(-1)
    out = out_one.float() * weight_one + out_two.float() * weight_two
    return out.to(out_one.dtype), lse


def by_layer(
    backend: Attention, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan
) -> tuple[Tensor, Tensor]:
    """`Attention.prefix` of several layers, one after the other."""
    parts = [
        backend.prefix(heads, *layer, plan)
        for heads, layer in zip(q.chunk(len(k), 2), zip(k, v, strict=True), strict=True)
    ]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def choose_backend(name: str = "auto") -> Attention:
    """The backend called `name`; `auto` means our own if this machine can have it, else torch's."""
    check_known("attention backend", name, ("auto", *BACKENDS))
    if name == "reference":
        from longspec.attention.reference import ReferenceAttention

        return ReferenceAttention()
    if name == "triton" or (name == "auto" and _has_gpu_for_kernels()):
        if find_spec("triton") is None:
            raise UserError("attention backend 'triton' needs the package triton: pip install triton")
        from longspec.attention.triton_backend import TritonAttention

        return TritonAttention()
    from longspec.attention.native_backend import NativeAttention
    from longspec.attention.torch_backend import TorchAttention
    from longspec.native.build import library, what_is_missing

    if name != "torch" and library() is not None:
        return NativeAttention()
    if name == "native":
        raise UserError(
            f"attention backend 'native' needs a C compiler with OpenMP, such as gcc ({what_is_missing()})"
        )
    return TorchAttention()


def _has_gpu_for_kernels() -> bool:
    # GPUs older than Ampere have no bf16.
    found = torch.cuda.is_available() and torch.version.hip is None and find_spec("triton") is not None
    return found and torch.cuda.get_device_capability() >= (8, 0)
