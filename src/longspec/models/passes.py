"""Forward passes of the target over pages of KV, plain and fused. One object serves all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from longspec.attention import Attention, AttentionPlan
from longspec.cache import Pages
from longspec.models.layers import PLAIN, BlockByBlock, ForwardPass, Ops, Rope, SelfAttention
from longspec.models.native_pass import NativePass, ops_of
from longspec.models.target import Transformer

if TYPE_CHECKING:
    from longspec.models.fused import FusedOps


@dataclass(frozen=True)
class PlainPass(BlockByBlock):
    """Writes the new tokens' KV into the pages and attends, with torch's operations."""

    pages: Pages
    places: Tensor
    """Where the new tokens' keys and values go, int64 [B, T]."""
    rope: Rope
    attention: Attention
    plan: AttentionPlan
    end: AttentionPlan | None = None
    ops: Ops = PLAIN

    def attend(self, module: SelfAttention, qkv: Tensor) -> Tensor:
        q, k, v = module.heads(qkv.to(self.pages.keys.dtype), self.rope)
        self.pages.write(module.layer, self.places, k, v)
        return _attend(self, module.layer, q).to(qkv.dtype)


@dataclass(frozen=True)
class FusedPass(BlockByBlock):
    """The same with our own kernels."""

    pages: Pages
    places: Tensor
    positions: Tensor
    table: Tensor
    """`RopeTable.table`."""
    attention: Attention
    plan: AttentionPlan
    end: AttentionPlan | None
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
    """Attend with the queries of a layer whose keys and values are already written."""
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
    """A pass over tokens at `positions` [B, T] of their texts, whose KV goes to `places` [B, T] of the pages.

    `end` is a plan for the last tokens. With it, only their hidden states are computed: for the other tokens
    the last layer computes keys and values and nothing else.
    """
    if not fused:
        native = NativePass.over(target, pages, positions, places, plan, end)
        if native is not None:
            return native
        ops = ops_of(target.first_block.ffn)
        cos, sin = target.rope(positions)
        return PlainPass(pages, places, (cos, sin), target.attention, plan, end, ops)
    from longspec.models.fused import FusedOps

    table, ops = target.rope.table, FusedOps(exact=plan.paths is not None)
    return FusedPass(pages, places, positions, table, target.attention, plan, end, ops)
