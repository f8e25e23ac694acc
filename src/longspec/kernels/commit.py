"""Moving the accepted path's keys and values into place, for all layers in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap


@launched
@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_steps"])
def _commit_kernel(
    keys, values, lengths, path, num_kept,
    k_l, k_b, k_h, k_s, v_l, v_b, v_h, v_s, num_rows, num_heads, num_steps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    problem = tl.program_id(0).to(tl.int64)
    head, b, layer = problem % num_heads, problem // num_heads % num_rows, problem // num_heads // num_rows
    step, d = tl.arange(0, STEPS), tl.arange(0, BLOCK_D)
    kept = step < tl.minimum(tl.load(num_kept + b), num_steps)
    first = tl.load(lengths + b)
    source = first + tl.load(path + b * num_steps + step, mask=kept, other=0)
    goal = first + step
    # What stands where it belongs, the root for one, is left alone.
    moved = (kept & (source != goal))[:, None] & (d < D)[None, :]
    keys += layer * k_l + b * k_b + head * k_h
    values += layer * v_l + b * v_b + head * v_h
    key = tl.load(keys + (source * k_s)[:, None] + d[None, :], mask=moved)
    value = tl.load(values + (source * v_s)[:, None] + d[None, :], mask=moved)
    # One entry's place may be another's source: all is read before anything is written.
    tl.debug_barrier()
    tl.store(keys + (goal * k_s)[:, None] + d[None, :], key, mask=moved)
    tl.store(values + (goal * v_s)[:, None] + d[None, :], value, mask=moved)


def commit_path(keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor, num_kept: Tensor) -> None:
    """Move entries lengths + path[i] of keys and values [L, B, K, S, D] to lengths + i, for i < num_kept.

    lengths and num_kept are int64 [B], path int64 [B, P]. The lengths are not changed.
    """
    L, B, K, _, D = keys.shape
    P = path.shape[1]
    _commit_kernel[(L * B * K,)](
        keys, values, lengths, path.contiguous(), num_kept, *keys.stride()[:4], *values.stride()[:4], B, K, P,
        D=D, BLOCK_D=triton.next_power_of_2(D), STEPS=triton.next_power_of_2(P), num_warps=4,
        **overlap(keys.device),
    )  # fmt: skip
