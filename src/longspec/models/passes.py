"""Forward passes of the target over pages of KV, plain and fused: one for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from longspec.attention import Attention, AttentionPlan
from longspec.cache import Pages
from longspec.models.layers import PLAIN, ForwardPass, Ops, Rope, SelfAttention
from longspec.models.target import Transformer

if TYPE_CHECKING:
    from longspec.models.fused import FusedOps


@dataclass(frozen=True)
class PlainPass:
    """New tokens follow what is in the pages, and join it; by torch's operations."""

    pages: Pages
    places: Tensor
    """Where the new tokens' keys and values go, int64 [B, T]."""
    rope: Rope
    attention: Attention
    plan: AttentionPlan
    end: AttentionPlan | None = None
    """See `paged_pass`."""
    ops: Ops = PLAIN

    def attend(self, module: SelfAttention, qkv: Tensor) -> Tensor:
        # Keys and values are written past the prefix first.
        q, k, v = module.heads(qkv, self.rope)
        self.pages.write(module.layer, self.places, k, v)
        return _attend(self, module.layer, q)


@dataclass(frozen=True)
class FusedPass:
    """The same by our own kernels."""

    pages: Pages
    places: Tensor
    positions: Tensor
    table: Tensor
    """Of `RopeTable`."""
    attention: Attention
    plan: AttentionPlan
    end: AttentionPlan | None
    """See `paged_pass`."""
    ops: FusedOps

    def attend(self, module: SelfAttention, qkv: Tensor) -> Tensor:
        from longspec.kernels.rope import rope_write

        k, v = self.pages.layer(module.layer)
        norms = None
        if module.q_norm is not None and module.k_norm is not None:
            norms = (module.q_norm.weight, module.k_norm.weight, module.q_norm.eps)
        q = rope_write(qkv, self.table, self.positions, self.places, k, v, norms)
        return _attend(self, module.layer, q)


def _attend(run: PlainPass | FusedPass, layer: int, q: Tensor) -> Tensor:
    """Attend by the queries of a layer whose keys and values are written."""
    plan, k, v = run.plan, *run.pages.layer(layer)
    if run.end is not None and layer == run.pages.num_layers - 1:
        plan, q = run.end, q[:, -run.end.num_new :]
    return run.attention.attend(q, k, v, plan)[0].flatten(2)


def paged_pass(
    target: Transformer,
    pages: Pages,
    positions: Tensor,
    places: Tensor,
    plan: AttentionPlan,
    fused: bool,
    end: AttentionPlan | None = None,
) -> ForwardPass:
    """A pass over tokens that stand at `positions` [B, T] of their texts and at `places` of the pages.

    With `end`, a plan for the last tokens, only their hidden states are computed: the last layer then makes
    the keys and values of the others and nothing else of them.
    """
    if not fused:
        return PlainPass(pages, places, target.rope(positions), target.attention, plan, end)
    from longspec.models.fused import FusedOps

    table = target.rope.table
    return FusedPass(pages, places, positions, table, target.attention, plan, end, FusedOps())
