"""The draft's passes in decoding: attention to its ring, to its tree and to the target's pages."""

from __future__ import annotations

from ctypes import pointer
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longspec.attention import Attention, AttentionPlan
from longspec.attention.native_backend import NativeAttention, Seen
from longspec.cache import DraftRing, Pages
from longspec.models.draft import GlideDraft
from longspec.models.layers import PLAIN, Ops, Rope
from longspec.models.native_pass import NATIVE, native, ops_of
from longspec.native.build import Context, Draft, DraftedChain, Writing, code


@dataclass(frozen=True)
class PlainDraftPass:
    """The root or one level of nodes, with torch's operations."""

    draft: GlideDraft
    ring: DraftRing
    pages: Pages
    attention: Attention
    plan: AttentionPlan
    rope: Rope
    """Of all projected tokens; the queries come first."""
    entries: Tensor | None
    """Where in the ring the keys and values go, [B, T]; None: after the ring, as nodes from `first` on."""
    first: int
    sees: Tensor
    """Which entries the queries see: how many of the first ones, [B], or a mask [B, n, S]."""
    num_queries: int
    ops: Ops = PLAIN

    def attend_self(self, qkv: Tensor) -> Tensor:
        q, k, v = self.draft.heads(qkv, self.rope)
        if self.entries is None:
            self.ring.put_nodes(self.first, k, v)
        else:
            self.ring.put(self.entries, k, v)
        attend = self.attention.filled if self.sees.ndim == 1 else self.attention.masked
        return attend(q[:, : self.num_queries], self.ring.keys, self.ring.values, self.sees)[0].flatten(2)

    def attend_cross(self, queries: Tensor) -> Tensor:
        # Each node of a round lags at least 1, so it may see the whole prefix.
        cos, sin = (part[:, : self.num_queries] for part in self.rope)
        heads = self.draft.cross_heads(queries, (cos, sin))
        cross = _cross_pages(self.pages, self.draft.config.layers_of(self.draft.target_config))
        outs = [
            self.attention.prefix(q, *pair, self.plan)[0]
            for q, pair in zip(heads.to(self.pages.keys.dtype).chunk(len(cross), 2), cross, strict=True)
        ]
        return torch.cat(outs, 2).flatten(2).to(queries.dtype)


class NativeDraftPass:
    """The passes of a round by our C code, one call for each level."""

    def __init__(
        self, draft: GlideDraft, ring: DraftRing, pages: Pages, plan: AttentionPlan, table: Tensor
    ) -> None:
        """`table` is `RopeTable.table`."""
        self._draft, self._ring, self._plan, self._table = draft, ring, plan, table
        ((self._keys, self._values),) = _cross_pages(pages, draft.config.layers_of(draft.target_config))

    @staticmethod
    def covers(draft: GlideDraft, pages: Pages, attention: Attention) -> bool:
        """Whether the C code has products for this draft and attends to such keys."""
        is_native = isinstance(attention, NativeAttention) and attention.covers(pages.keys)
        layers = draft.config.layers_of(draft.target_config)
        return is_native and ops_of(draft.ffn) is NATIVE and len(_cross_pages(pages, layers)) == 1

    def read(self, x: Tensor, stream: Tensor, positions: Tensor, entries: Tensor, sees: Tensor) -> Tensor:
        """Hidden states, as `GlideDraft.read` describes them. They may be written over `stream`.

        The tokens are at `positions` [B, T], and their keys and values go to `entries` [B, T] of the ring.
        `sees` is as in `PlainDraftPass`.
        """
        (B, n, _), x = stream.shape, x.contiguous()
        stream, positions = stream.contiguous(), positions.contiguous()
        asked = positions[:, :n].contiguous()
        num_entries = self._ring.keys.shape[2]
        places = entries + torch.arange(0, B * num_entries, num_entries)[:, None]
        to = self._writing()
        to.num_tokens = positions.numel()
        to.places, to.positions = places.data_ptr(), positions.data_ptr()
        counts, own, mask = (sees, 0, None) if sees.ndim == 1 else (None, sees.shape[2], sees)
        near = self._near(B, n, counts, own, mask)
        near.query_row_stride = positions.shape[1] * near.query_stride
        code().draft_level(
            _weights(self._draft), to, near, self._far(B, n), asked.data_ptr(), x.data_ptr(),
            stream.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return stream

    def describe(self, chain: DraftedChain, num_rows: int) -> None:
        """Put the weights, and where a level's queries read and write, into `chain`."""
        near, far = self._near(num_rows, 1, self._plan.lengths), self._far(num_rows, 1)
        chain.draft = pointer(_weights(self._draft))
        chain.to = self._writing()
        chain.ring, chain.pages = near, far
        chain.kept += [near.kept, far.kept]

    def _writing(self) -> Writing:
        draft, ring = self._draft, self._ring
        return Writing(
            keys=ring.keys.data_ptr(),
            values=ring.values.data_ptr(),
            num_entries=ring.keys.stride(1) // draft.head_dim,
            num_heads=draft.num_heads,
            num_kv_heads=draft.num_kv_heads,
            head_dim=draft.head_dim,
            angles=self._table.data_ptr(),
            num_angles=self._table.shape[1],
        )

    def _near(
        self, num_rows: int, num_queries: int, counts: Tensor | None, own: int = 0, mask: Tensor | None = None
    ) -> Context:
        """The ring, for the queries of self-attention."""
        draft, ring = self._draft, self._ring
        width = (draft.num_heads + 2 * draft.num_kv_heads) * draft.head_dim
        seen = Seen(ring.keys, ring.values, counts, own, mask)
        return seen.context(num_rows, num_queries, draft.num_heads, width)

    def _far(self, num_rows: int, num_queries: int) -> Context:
        """The target's KV, for the queries of cross-attention."""
        heads = self._draft.num_cross * self._draft.num_heads
        seen = Seen(self._keys, self._values, self._plan.lengths, plan=self._plan)
        return seen.context(num_rows, num_queries, heads, heads * self._draft.head_dim)


_WEIGHTS: WeakKeyDictionary[GlideDraft, Draft] = WeakKeyDictionary()


def _weights(draft: GlideDraft) -> Draft:
    """A draft's weights as the C code reads them."""
    if draft not in _WEIGHTS:
        linears = (
            draft.qkv,
            draft.self_output,
            draft.cross_q,
            draft.cross_output,
            draft.ffn.gate_up,
            draft.ffn.down,
        )
        norms = (draft.self_norm, draft.cross_norm, draft.ffn_norm, draft.final_norm)
        _WEIGHTS[draft] = Draft(
            *(pointer(native(linear).matrix) for linear in linears),
            *(norm.weight.data_ptr() if norm else None for norm in norms),
            draft.self_norm.eps,
        )
    return _WEIGHTS[draft]


@dataclass(frozen=True)
class FusedDraftPass:
    """The root or one level of nodes, with our own kernels."""

    draft: GlideDraft
    ring: DraftRing
    pages: Pages
    attention: Attention
    plan: AttentionPlan
    table: Tensor
    """`RopeTable.table`."""
    parents: Tensor
    """Of the tree's nodes so far, int64 [B, N]."""
    positions: Tensor
    """Of all projected tokens, [B, T]."""
    entries: Tensor
    queries_at: Tensor
    """The positions of the queries, [B, n]."""
    first: int
    depth: int
    ops: Ops

    def attend_self(self, qkv: Tensor) -> Tensor:
        from longspec.kernels.masked import Nodes, masked
        from longspec.kernels.rope import rope_write

        ring = self.ring
        q = rope_write(qkv, self.table, self.positions, self.entries, ring.keys, ring.values)
        nodes = Nodes(ring.positions, ring.window, self.plan.lengths, self.parents, self.first, self.depth)
        return masked(q[:, : self.queries_at.shape[1]], ring.keys, ring.values, nodes)[0].flatten(2)

    def attend_cross(self, queries: Tensor) -> Tensor:
        from longspec.kernels.rope import rope_write

        # Only queries are rotated, so the keys and values have no heads.
        none = self.ring.keys[:, :0]
        heads = rope_write(queries, self.table, self.queries_at, self.queries_at, none, none)
        cross = _cross_pages(self.pages, self.draft.config.layers_of(self.draft.target_config))
        outs = [
            self.attention.prefix(q, *pair, self.plan)[0]
            for q, pair in zip(heads.chunk(len(cross), 2), cross, strict=True)
        ]
        return (outs[0] if len(outs) == 1 else torch.cat(outs, 2)).flatten(2)


def _cross_pages(pages: Pages, layers: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """The keys and values of these layers. Evenly spaced layers give one pair [C, K, S, D], so that one call
    attends to all of them; other layers give one pair each."""
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    if step > 0 and layers == tuple(range(layers[0], layers[-1] + 1, step)):
        every = slice(layers[0], layers[-1] + 1, step)
        return [(pages.keys[every], pages.values[every])]
    return [pages.layer(layer) for layer in layers]
