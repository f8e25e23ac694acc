"""Attention with the kernels that torch ships, on any device, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from longspec.attention.base import AttentionPlan, by_layer, merge

# Chains up to this length are masked like trees, in one call for all heads; causal takes one call per head.
_SHORT = 64
# Up to this many entries one mask covers prefix and new tokens; a larger one costs more to read than a merge.
_LARGEST_BIAS = 2**18
# Up to this many keys it is cheaper to copy the parts together than to call once per part and merge.
_CHEAP_COPY = 1024
# How many queries and keys one cuDNN call takes (fastest on an H200), and the smallest block given to cuDNN.
_MOST_QUERIES, _MOST_KEYS, _LEAST_BLOCK = 32768, 32768, 2048


class TorchAttention:
    """FlashAttention if torch has it for the dtype and device.

    On a GPU the query heads that share a KV head become rows of one attention problem, so keys are never
    repeated. Each row is computed alone with its own length. So there is no padding, and a row's result
    cannot depend on its neighbours.
    """

    def can_fuse(self, x: Tensor, head_dim: int) -> bool:
        return False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Reads the lengths on the host, once per forward pass."""
        return _stack([self._attend_row(q[row], k, v, plan, row) for row in range(q.shape[0])])

    def _attend_row(
        self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, row: int
    ) -> tuple[Tensor, Tensor]:
        length = plan.host_lengths[row]
        end = length + plan.num_new
        if plan.num_new == 1 and plan.window is None:
            return _over(q, k, v, plan.runs(row, 0, end))
        ranges = plan.ranges(row)
        if plan.num_new == 1:
            # A single new token sees all that is before it, so it counts as one more entry of the prefix.
            ranges = [*ranges[:-1], (ranges[-1][0] if ranges else length, end)]
            return _over(q, k, v, [run for part in ranges for run in plan.runs(row, *part)])
        runs = [run for part in ranges for run in plan.runs(row, *part)]
        own = plan.runs(row, length, end)
        if plan.tree is None and plan.num_new > _SHORT:
            if plan.window is None and _has_cudnn(q):
                return self._attend_blocks(q, k, v, plan, row)
            result = _causal(q, *_cut(q, k, v, own))
        else:
            if ranges == [(0, length)] and _fits_mask(q, plan.num_new * end):
                whole = plan.runs(row, 0, end)
                return _biased(q, *_cut(q, k, v, whole), _whole_bias(plan, row, q))
            result = _masked(q, *_cut(q, k, v, own), _tree_of(plan, row))
        return self._merge(_over(q, k, v, runs), result) if runs else result

    def _attend_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, row: int
    ) -> tuple[Tensor, Tensor]:
        """The queries of a long chain, block by block: each sees all entries before its block, and its own
        block causally."""
        length, found = plan.host_lengths[row], []
        for block in _pieces(slice(0, plan.num_new), _MOST_QUERIES):
            start, end = length + block.start, length + block.stop
            own = plan.runs(row, start, end)
            result = _causal(q[block], *_cut(q, k, v, own))
            for run in plan.runs(row, 0, start):
                for part in _pieces(run, _MOST_KEYS):
                    result = self._merge(_unmasked(q[block], *_cut(q, k, v, [part])), result)
            found.append(result)
        if len(found) == 1:
            return found[0]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    def _merge(self, one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return merge(one, two)

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        if k.ndim == 4:
            return by_layer(self, q, k, v, plan)
        rows = []
        for row in range(q.shape[0]):
            runs = [run for part in plan.ranges(row) for run in plan.runs(row, *part)]
            nothing = q.new_full(q.shape[1:3], -torch.inf, dtype=torch.float32)
            rows.append(_over(q[row], k, v, runs) if runs else (torch.zeros_like(q[row]), nothing))
        return _stack(rows)

    def warm_up(self, q: Tensor, num_kv_heads: int, longest: int) -> None:
        """Queries will be like q [T, H, D]."""
        if not _has_cudnn(q):
            return
        size, _, D = _LEAST_BLOCK, *q.shape[1:]
        shapes = []
        while size <= min(longest, _MOST_QUERIES):
            shapes.append((size, size, True))
            size *= 2
        if longest > _MOST_KEYS:
            shapes.append((_MOST_QUERIES, _MOST_KEYS, False))
        for num_queries, num_keys, causal in shapes:
            keys = q.new_zeros(num_kv_heads, num_keys, D)
            _cudnn(q.new_zeros(num_queries, q.shape[1], D), keys, keys, causal)

    def masked(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        return _stack([_masked(q[row], k[row], v[row], sees[row]) for row in range(q.shape[0])])

    def filled(self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        ends = counts.tolist()
        return _stack([_unmasked(q[row], k[row, :, :end], v[row, :, :end]) for row, end in enumerate(ends)])


def _fits_mask(q: Tensor, size: int) -> bool:
    """Whether to use one mask for prefix and new tokens. On a GPU or a long prefix, two calls are faster."""
    return q.device.type == "cpu" and size <= _LARGEST_BIAS


def _whole_bias(plan: AttentionPlan, row: int, q: Tensor) -> Tensor:
    """The bias on a row's scores [T, S] over its whole prefix and the new tokens: 0 or -inf."""
    if row not in plan.masks:
        length = plan.host_lengths[row]
        bias = q.new_zeros(plan.num_new, length + plan.num_new)
        bias[:, length:].masked_fill_(~_tree_of(plan, row), -torch.inf)
        plan.masks[row] = bias
    return plan.masks[row]


def _tree_of(plan: AttentionPlan, row: int) -> Tensor:
    """Which new tokens each new token of a row sees, bool [T, T]."""
    if plan.tree is None:
        return torch.ones(plan.num_new, plan.num_new, dtype=torch.bool, device=plan.lengths.device).tril()
    return plan.tree if plan.tree.ndim == 2 else plan.tree[row]


def _pieces(whole: slice, most: int) -> Iterator[slice]:
    """Cut a run of queries or keys into one part for each call.

    cuDNN takes a tenth of a second to prepare for a new shape. So it gets few shapes: powers of two up to
    `most`, then a shorter rest.
    """
    start = whole.start
    while (left := whole.stop - start) > 0:
        size = min(1 << (left.bit_length() - 1), most) if left >= _LEAST_BLOCK else left
        yield slice(start, start + size)
        start += size


def _over(q: Tensor, k: Tensor, v: Tensor, runs: list[slice]) -> tuple[Tensor, Tensor]:
    """Queries [T, H, D] over these parts of keys [K, S, D]. Every query sees every key."""
    if len(runs) == 1 or sum(run.stop - run.start for run in runs) <= _CHEAP_COPY:
        return _unmasked(q, *_cut(q, k, v, runs))
    parts = [_unmasked(q, *_cut(q, k, v, [run])) for run in runs]
    return reduce(merge, parts)


def _cut(q: Tensor, k: Tensor, v: Tensor, runs: list[slice]) -> tuple[Tensor, Tensor]:
    """Cut these parts out of keys and values [K, S, D] and join them. fp8 becomes the queries' dtype."""
    keys, values = ([part[:, run].to(q.dtype) for run in runs] for part in (k, v))
    return (keys[0], values[0]) if len(runs) == 1 else (torch.cat(keys, 1), torch.cat(values, 1))


def _stack(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(rows) == 1:
        return rows[0][0].unsqueeze(0), rows[0][1].unsqueeze(0)
    outs, lses = zip(*rows, strict=True)
    return torch.stack(outs), torch.stack(lses)


def _unmasked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [T, H, D] over keys [K, S, D]. Every query sees every key."""
    if q.device.type == "cpu":
        return _on_cpu(q, k, v)
    if _suits_cudnn(q, k):
        return _cudnn(q, k, v, causal=False)
    out, lse = _flash(_fold(q, k.shape[0]), k, v)
    return _unfold(out, q.shape), _unfold(lse, q.shape[:2])


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a mask [T, S] of the keys that each query sees: at least one."""
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    return _biased(q, k, v, bias)


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a bias [T, S], which is added to the scores."""
    if q.device.type == "cpu":
        return _on_cpu(q, k, v, bias)
    groups = q.shape[1] // k.shape[0]
    out, lse = _flash(_fold(q, k.shape[0]), k, v, bias.repeat_interleave(groups, 0))
    return _unfold(out, q.shape), _unfold(lse, q.shape[:2])


def _causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        return _on_cpu(q, k, v, causal=True)
    if _suits_cudnn(q, k):
        return _cudnn(q, k, v, causal=True)
    # One call per query head of a group: folded rows would not be causal.
    T, H, D = q.shape
    by_group = q.view(T, k.shape[0], -1, D).permute(2, 1, 0, 3)
    parts = [_flash(heads, k, v, causal=True) for heads in by_group]
    out = torch.stack([out for out, _ in parts], 1)
    lse = torch.stack([lse for _, lse in parts], 1)
    return out.permute(2, 0, 1, 3).reshape(T, H, D), lse.permute(2, 0, 1).reshape(T, H)


def _has_cudnn(q: Tensor) -> bool:
    """Whether cuDNN's attention supports such queries. On an H200 it is nearly twice as fast as flash."""
    return q.is_cuda and q.dtype != torch.float32 and q.shape[2] % 8 == 0 and q.shape[2] <= 128


def _suits_cudnn(q: Tensor, k: Tensor) -> bool:
    """Whether cuDNN is prepared for this shape: `_pieces` cuts into such shapes."""
    sizes = (len(q), k.shape[1])
    return _has_cudnn(q) and min(sizes) >= _LEAST_BLOCK and all(size & (size - 1) == 0 for size in sizes)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Queries [T, H, D] over keys [K, S, D]; cuDNN handles grouped heads itself."""
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = kernel(q.transpose(0, 1)[None], k[None], v[None], None, True, 0.0, causal, False)[:2]
    return out[0].transpose(0, 1), lse.view(q.shape[1], q.shape[0]).transpose(0, 1)


def _fold(q: Tensor, num_kv_heads: int) -> Tensor:
    """[T, H, D] to [K, T * G, D]."""
    T, _, D = q.shape
    return q.view(T, num_kv_heads, -1, D).transpose(0, 1).reshape(num_kv_heads, -1, D)


def _unfold(x: Tensor, shape: torch.Size) -> Tensor:
    """[K, T * G, ...] back to `shape`, [T, H, ...]."""
    return x.view(x.shape[0], shape[0], -1, *shape[2:]).transpose(0, 1).reshape(shape)


def _on_cpu(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Queries [T, H, D] over keys [K, S, D], grouped heads as they are, with a bias [T, S]."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = kernel(q.transpose(0, 1)[None], k[None], v[None], 0.0, causal, attn_mask=bias)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """q [K, R, D] over k, v [K, S, D] by the fastest of torch's GPU kernels that also returns the lse."""
    q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if bias is None and q.dtype != torch.float32:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    else:
        if bias is not None:
            # The kernel reads each row of the bias in aligned groups of 16, so the rows are padded.
            size = bias.shape[1]
            bias = torch.nn.functional.pad(bias, (0, -size % 16))[:, :size].expand(1, q.shape[1], -1, -1)
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse = kernel(q, k, v, bias, True, 0.0, causal)[:2]
    return out[0], lse[0, :, : q.shape[2]].float()
