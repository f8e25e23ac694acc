"""Attention by the kernels that torch ships, on any device, row by row."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspec.attention.base import AttentionPlan, merge

# Chains up to here are masked like trees: one call for all heads, where a causal one takes one per head.
_SHORT = 64
# Up to so many entries one mask covers prefix and new tokens; beyond, reading it costs more than a merge.
_LARGEST_BIAS = 2**18


@dataclass(frozen=True)
class _Plan(AttentionPlan):
    """With the masks that its layers share."""

    biases: dict[int, Tensor] = field(default_factory=dict)

    def whole_bias(self, row: int, q: Tensor, groups: int) -> Tensor | None:
        """What is added to a row's scores [T * G, S] over its whole prefix and the new tokens.

        None where two calls are better: on a GPU, over a long prefix, or over parts of it.
        """
        length, T = self.host_lengths[row], self.num_new
        if self.tree is None or q.device.type != "cpu" or self.ranges(row) != [(0, length)]:
            return None
        if T * groups * (length + T) > _LARGEST_BIAS:
            return None
        if row not in self.biases:
            tree = self.tree if self.tree.ndim == 2 else self.tree[row]
            bias = q.new_zeros(T, length + T)
            bias[:, length:].masked_fill_(~tree, -torch.inf)
            self.biases[row] = bias.repeat_interleave(groups, 0)
        return self.biases[row]


class TorchAttention:
    """FlashAttention where torch has it for the type and device.

    The query heads that share a KV head are folded into rows of one attention problem, so nothing is ever
    repeated. Rows have lengths of their own and are taken one by one: no work on padding, and a row's
    result cannot depend on its neighbours.
    """

    def fuses(self, x: Tensor) -> bool:
        """See `Attention.fuses`."""
        return False

    def plan(
        self,
        lengths: Tensor,
        num_new: int,
        tree: Tensor | None = None,
        sinks: int = 0,
        window: int | None = None,
    ) -> AttentionPlan:
        """See `Attention.plan`. Attention will read the lengths on the host, once per forward pass."""
        if tree is None and 1 < num_new <= _SHORT:
            tree = torch.ones(num_new, num_new, dtype=torch.bool, device=lengths.device).tril()
        return _Plan(lengths, num_new, tree, sinks, window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        rows = []
        for row, length in enumerate(plan.host_lengths):
            query, end = q[row], length + plan.num_new
            ranges = plan.ranges(row)
            bias = plan.whole_bias(row, q, q.shape[2] // k.shape[1]) if isinstance(plan, _Plan) else None
            if bias is not None:
                rows.append(_biased(query, k[row, :, :end], v[row, :, :end], bias))
                continue
            if plan.num_new == 1:
                # The one new token is like one more of the prefix: a part that ends there takes it along.
                start = ranges.pop()[0] if ranges else length
                result = _unmasked(query, k[row, :, start:end], v[row, :, start:end])
            elif plan.tree is None:
                result = _causal(query, k[row, :, length:end], v[row, :, length:end])
            else:
                tree = plan.tree if plan.tree.ndim == 2 else plan.tree[row]
                result = _masked(query, k[row, :, length:end], v[row, :, length:end], tree)
            for start, stop in ranges:
                result = merge(_unmasked(query, k[row, :, start:stop], v[row, :, start:stop]), result)
            rows.append(result)
        return _stack(rows)

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """See `Attention.prefix`."""
        rows = []
        for row in range(len(plan.host_lengths)):
            result = None
            for start, stop in plan.ranges(row):
                part = _unmasked(q[row], k[row, :, start:stop], v[row, :, start:stop])
                result = merge(part, result) if result else part
            if result is None:
                nothing = q.new_full(q.shape[1:3], -torch.inf, dtype=torch.float32)
                result = (torch.zeros_like(q[row]), nothing)
            rows.append(result)
        return _stack(rows)

    def masked(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention.masked`."""
        return _stack([_masked(q[row], k[row], v[row], sees[row]) for row in range(q.shape[0])])


def _stack(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(rows) == 1:
        return rows[0][0].unsqueeze(0), rows[0][1].unsqueeze(0)
    outs, lses = zip(*rows, strict=True)
    return torch.stack(outs), torch.stack(lses)


def _unmasked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [T, H, D] over keys [K, S, D], every query seeing every key."""
    out, lse = _flash(_fold(q, k.shape[0]), k, v)
    return _unfold(out, q.shape), _unfold(lse, q.shape[:2])


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a mask [T, S] that says which keys each query sees; it must see one at least."""
    groups = q.shape[1] // k.shape[0]
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    return _biased(q, k, v, bias.repeat_interleave(groups, 0))


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The same with what is added to the scores, [T * G, S]."""
    out, lse = _flash(_fold(q, k.shape[0]), k, v, bias)
    return _unfold(out, q.shape), _unfold(lse, q.shape[:2])


def _causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Query t sees keys 0..t. One call per query head of a group: folded rows would not be causal."""
    T, H, D = q.shape
    by_group = q.view(T, k.shape[0], -1, D).permute(2, 1, 0, 3)
    parts = [_flash(heads, k, v, causal=True) for heads in by_group]
    out = torch.stack([out for out, _ in parts], 1)
    lse = torch.stack([lse for _, lse in parts], 1)
    return out.permute(2, 0, 1, 3).reshape(T, H, D), lse.permute(2, 0, 1).reshape(T, H)


def _fold(q: Tensor, num_kv_heads: int) -> Tensor:
    """[T, H, D] to [K, T * G, D]."""
    T, _, D = q.shape
    return q.view(T, num_kv_heads, -1, D).transpose(0, 1).reshape(num_kv_heads, -1, D)


def _unfold(x: Tensor, shape: torch.Size) -> Tensor:
    """[K, T * G, ...] back to `shape`, [T, H, ...]."""
    return x.view(x.shape[0], shape[0], -1, *shape[2:]).transpose(0, 1).reshape(shape)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """q [K, R, D] over k, v [K, S, D] by the fastest of torch's kernels that also returns the lse."""
    q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, causal, attn_mask=bias)
    elif bias is None and q.dtype != torch.float32:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    else:
        if bias is not None:
            # The kernel reads rows of the bias in aligned groups, so each row's storage is rounded up.
            size = bias.shape[1]
            bias = torch.nn.functional.pad(bias, (0, -size % 16))[:, :size].expand(1, q.shape[1], -1, -1)
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse = kernel(q, k, v, bias, True, 0.0, causal)[:2]
    return out[0], lse[0, :, : q.shape[2]].float()
