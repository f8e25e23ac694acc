"""q/k norm, rope, and writing the new keys and values to the cache, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap

_HEADS = 8
# The largest number of fp8 (e4m3).
_LARGEST = tl.constexpr(448.0)


@triton.jit
def _head_norm(x, swapped, weight, weight_swapped, eps, D: tl.constexpr):
    """RMSNorm of heads, and of the same heads with their halves swapped."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    return x * scale * weight, swapped * scale * weight_swapped


@triton.jit
def _as_kept(x, dtype: tl.constexpr):
    """x in the cache's dtype. fp8 is the nearest number, at most the largest; nan stays nan."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@launched
@triton.jit(do_not_specialize=["num_heads", "num_kv_heads", "num_tokens"])
def _rope_kernel(
    qkv, table, positions, entries, q_weight, k_weight, q, keys, values,
    stride, table_half, k_b, k_h, k_s, v_b, v_h, v_s,
    num_heads, num_kv_heads, num_tokens, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q = (head < num_heads)[:, None]
    is_k = ((head >= num_heads) & (head < num_heads + num_kv_heads))[:, None]
    is_v = ((head >= num_heads + num_kv_heads) & (head < num_heads + 2 * num_kv_heads))[:, None]
    other = (d + D // 2) % D
    real = (d < D)[None, :]
    inside = (is_q | is_k | is_v) & real
    # Positions and entries were written before the projection began.
    position, entry = tl.load(positions + token), tl.load(entries + token)
    cos = tl.load(table + position * D + d, mask=d < D, other=0.0)[None, :]
    sin = tl.load(table + table_half + position * D + d, mask=d < D, other=0.0)[None, :]
    await_turn(OVERLAP)
    head_at = (qkv + token * stride) + head[:, None] * D
    raw = tl.load(head_at + d[None, :], mask=inside, other=0.0)
    x = raw.to(tl.float32)
    swapped = tl.load(head_at + other[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        ours, theirs = d[None, :] + head[:, None] * 0, other[None, :] + head[:, None] * 0
        weight = tl.load(q_weight + ours, mask=is_q & real, other=0.0).to(tl.float32)
        weight += tl.load(k_weight + ours, mask=is_k & real, other=0.0).to(tl.float32)
        weight_swapped = tl.load(q_weight + theirs, mask=is_q & real, other=0.0).to(tl.float32)
        weight_swapped += tl.load(k_weight + theirs, mask=is_k & real, other=0.0).to(tl.float32)
        x, swapped = _head_norm(x, swapped, weight, weight_swapped, eps, D)
    rotated = (x * cos + swapped * sin).to(raw.dtype)

    tl.store(q + (token * num_heads + head[:, None]) * D + d[None, :], rotated, mask=is_q & real)
    b = token // num_tokens
    k_head, v_head = head - num_heads, head - num_heads - num_kv_heads
    k_at = keys + b * k_b + entry * k_s + k_head.to(tl.int64)[:, None] * k_h + d[None, :]
    tl.store(k_at, _as_kept(rotated, keys.dtype.element_ty), mask=is_k & real)
    v_at = values + b * v_b + entry * v_s + v_head.to(tl.int64)[:, None] * v_h + d[None, :]
    tl.store(v_at, _as_kept(raw, values.dtype.element_ty), mask=is_v & real)


def rope_write(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    entries: Tensor,
    keys: Tensor,
    values: Tensor,
    norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Returns rotated queries [B, T, H, D], and writes keys and values to `keys` and `values`: a draft's ring
    [B, K, S, D], or pages [K, S, D], which all rows share. Those may be fp8.

    qkv [B, T, (H + 2 K) D] is the projection; table [2, capacity, D] is `RopeTable.table`; positions and
    entries, int64 [B, T], say where each token is in the text and in S. An earlier kernel than the one that
    wrote qkv must have written them (`longspec.kernels.launch`). `norm` is the weights [D] of the queries'
    and the keys' RMSNorm, and its eps.
    """
    B, T, width = qkv.shape
    # Stride 0 over rows, because all rows share the pages.
    keys, values = (part if part.ndim == 4 else part.expand(B, -1, -1, -1) for part in (keys, values))
    K, D = keys.shape[1], keys.shape[3]
    H = width // D - 2 * K
    qkv = qkv.contiguous()
    q = torch.empty(B, T, H, D, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = norm if norm is not None else (table, table, 0.0)
    _rope_kernel[(B * T, triton.cdiv(H + 2 * K, _HEADS))](
        qkv, table, positions.contiguous(), entries.contiguous(), q_weight, k_weight, q, keys, values,
        width, table.stride(0), *keys.stride()[:3], *values.stride()[:3], H, K, T, eps,
        D=D, BLOCK_D=triton.next_power_of_2(D), HEADS=_HEADS, NORM=norm is not None, num_warps=2,
        **overlap(qkv.device),
    )  # fmt: skip
    return q
