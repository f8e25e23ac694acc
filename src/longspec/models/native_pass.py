"""Decoding on a CPU by our C code (`native/decode.c`): it takes tokens through all layers of a target, and
writes and reads their keys and values.

A token gets the same bits alone, as a node of a tree and beside other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, pointer
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from longspec.attention import AttentionPlan
from longspec.attention.native_backend import NativeAttention, Seen
from longspec.cache import Pages
from longspec.models.layers import (
    PLAIN,
    Block,
    BlockByBlock,
    FeedForward,
    Ops,
    PlainOps,
    Reader,
    RMSNorm,
    SelfAttention,
    Stream,
)
from longspec.models.native_linears import NativeLinear
from longspec.native.build import Layer, Writing, code

if TYPE_CHECKING:
    from longspec.models.target import Transformer


# Tokens of a row up to which all layers are one C call. A longer one would keep Ctrl-C waiting.
_FEW_TOKENS = 64


class NativeOps(PlainOps):
    """What is around products, computed with them."""

    def normed_linear(self, reader: Reader, stream: Stream) -> tuple[Tensor, Stream]:
        norm, linear = reader
        return native(linear).normed(norm, stream), stream

    def feed_forward(
        self, ffn: FeedForward, norm: RMSNorm, stream: Stream, following: Reader | None
    ) -> Stream:
        return native(ffn.down).add_gated(stream, native(ffn.gate_up).normed(norm, stream))

    def finish(self, stream: Stream, norm: RMSNorm | None) -> Tensor:
        if norm is None:
            return stream
        stream = stream.contiguous()
        out, size = torch.empty_like(stream), stream.shape[-1]
        weight, num_rows = norm.weight.data_ptr(), stream.numel() // size
        code().norm(stream.data_ptr(), weight, norm.eps, size, num_rows, out.data_ptr())
        return out


def native(linear: nn.Module) -> NativeLinear:
    assert isinstance(linear, NativeLinear)
    return linear


NATIVE = NativeOps()


def ops_of(ffn: FeedForward) -> Ops:
    """What goes with the linears of a model that has this feed-forward."""
    # By `down`, because a rank's part of it is summed over ranks, which our C code does not do.
    return NATIVE if isinstance(ffn.get_submodule("down"), NativeLinear) else PLAIN


@dataclass(frozen=True)
class NativePass(BlockByBlock):
    """Writes the new tokens' KV into the pages and attends."""

    pages: Pages
    attention: NativeAttention
    plan: AttentionPlan
    end: AttentionPlan | None
    writing: Writing
    kept: tuple[Tensor, ...]
    """What `writing` points to."""
    layers: Array[Layer] | None
    """The weights of all layers, for one C call; None if the C code cannot compute every layer."""
    ops: Ops

    @classmethod
    def over(
        cls,
        target: Transformer,
        pages: Pages,
        positions: Tensor,
        places: Tensor,
        plan: AttentionPlan,
        end: AttentionPlan | None,
    ) -> NativePass | None:
        """A pass as `paged_pass` describes it; None where this cannot do it."""
        attention, first = target.attention, target.first_block.attention
        if not isinstance(attention, NativeAttention) or not attention.covers(pages.keys):
            return None
        # In training a norm may be empty, or torch's own kind of share.
        norm = first.q_norm
        if norm is not None and (type(norm.weight.data) is not Tensor or not norm.weight.numel()):
            return None
        kept = (places.contiguous(), positions.contiguous(), target.rope.table)
        _, num_kv_heads, num_entries, head_dim = pages.keys.shape
        writing = Writing(
            num_entries=num_entries,
            num_heads=first.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_tokens=positions.numel(),
            places=kept[0].data_ptr(),
            positions=kept[1].data_ptr(),
            angles=kept[2].data_ptr(),
            num_angles=kept[2].shape[1],
        )
        ops = ops_of(target.first_block.ffn)
        layers = _layers(target) if ops is NATIVE else None
        return cls(pages, attention, plan, end, writing, kept, layers, ops)

    def through(self, blocks: Sequence[Block], stream: Stream) -> Stream:
        if self.layers is None or stream.shape[1] > _FEW_TOKENS:
            return super().through(blocks, stream)
        to, plan, stream = self.writing, self.plan, stream.contiguous()
        k, v = self.pages.layer(0)
        to.keys, to.values = k.data_ptr(), v.data_ptr()
        width = (to.num_heads + 2 * to.num_kv_heads) * to.head_dim
        seen = Seen(k, v, plan.lengths, plan.num_new, plan.tree, plan)
        context = seen.context(len(stream), plan.num_new, to.num_heads, width)
        code().forward(
            self.layers, len(self.layers), to, context, self.pages.keys.stride(0), stream.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return stream if self.end is None else stream[:, -self.end.num_new :]

    def attend(self, module: SelfAttention, qkv: Tensor) -> Tensor:
        k, v = self.pages.layer(module.layer)
        to, plan, qkv = self.writing, self.plan, qkv.contiguous()
        to.keys, to.values = k.data_ptr(), v.data_ptr()
        if module.q_norm is not None and module.k_norm is not None:
            to.q_norm, to.k_norm = module.q_norm.weight.data_ptr(), module.k_norm.weight.data_ptr()
            to.eps = module.q_norm.eps
        code().rope_write(to, qkv.data_ptr())
        q = qkv.unflatten(-1, (-1, module.head_dim))[:, :, : module.num_heads]
        if self.end is not None and module.layer == self.pages.num_layers - 1:
            plan, q = self.end, q[:, -self.end.num_new :]
        return self.attention.attend(q, k, v, plan)[0].flatten(2)


_LAYERS: WeakKeyDictionary[Transformer, Array[Layer]] = WeakKeyDictionary()


def _layers(target: Transformer) -> Array[Layer]:
    """A target's weights as the C code reads them."""
    if target not in _LAYERS:
        _LAYERS[target] = (Layer * len(target.blocks))(*map(_layer, target.blocks))
    return _LAYERS[target]


def _layer(block: nn.Module) -> Layer:
    assert isinstance(block, Block)
    attention, ffn = block.attention, block.ffn
    norms = (block.attention_norm, block.ffn_norm, attention.q_norm, attention.k_norm)
    epsilons = (norm.eps if norm else 0.0 for norm in norms[:3])
    return Layer(
        *(
            pointer(native(linear).matrix)
            for linear in (attention.qkv, attention.output, ffn.gate_up, ffn.down)
        ),
        *(norm.weight.data_ptr() if norm else None for norm in norms),
        *epsilons,
    )
