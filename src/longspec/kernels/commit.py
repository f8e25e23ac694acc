"""Move the keys and values of the accepted path to the end of the prefix, for all layers in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap
from longspec.kernels.pages import check_tables, place_of


@launched
@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_steps", "tables_b"])
def _commit_kernel(
    keys, values, lengths, tables, path, num_kept,
    k_l, k_h, k_s, v_l, v_h, v_s, tables_b, num_rows, num_heads, num_steps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr, PAGE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_turn(OVERLAP)
    problem = tl.program_id(0).to(tl.int64)
    head, b, layer = problem % num_heads, problem // num_heads % num_rows, problem // num_heads // num_rows
    step, d = tl.arange(0, STEPS), tl.arange(0, BLOCK_D)
    kept = step < tl.minimum(tl.load(num_kept + b), num_steps)
    first = tl.load(lengths + b)
    node = tl.load(path + b * num_steps + step, mask=kept, other=0)
    tables += b * tables_b
    source, goal = place_of(tables, first + node, kept, PAGE), place_of(tables, first + step, kept, PAGE)
    # Entries that are already in place, such as the root's, do not move.
    moved = (kept & (node != step))[:, None] & (d < D)[None, :]
    keys += layer * k_l + head * k_h
    values += layer * v_l + head * v_h
    key = tl.load(keys + (source * k_s)[:, None] + d[None, :], mask=moved)
    value = tl.load(values + (source * v_s)[:, None] + d[None, :], mask=moved)
    # Read everything before the first write, because one entry's goal may be another entry's source.
    tl.debug_barrier()
    tl.store(keys + (goal * k_s)[:, None] + d[None, :], key, mask=moved)
    tl.store(values + (goal * v_s)[:, None] + d[None, :], value, mask=moved)


def commit_path(
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    tables: Tensor,
    page: int,
    path: Tensor,
    num_kept: Tensor,
) -> None:
    """Move a row's entries lengths + path[i] in keys and values [L, K, S, D] to lengths + i, i < num_kept.

    lengths and num_kept are int64 [B], path int64 [B, P], tables int32 [B, M] (`longspec.kernels.pages`).
    The lengths are not changed.
    """
    check_tables(tables, page)
    (L, K, _, D), (B, P) = keys.shape, path.shape
    _commit_kernel[(L * B * K,)](
        keys, values, lengths, tables, path.contiguous(), num_kept,
        *keys.stride()[:3], *values.stride()[:3], tables.stride(0), B, K, P,
        PAGE=page, D=D, BLOCK_D=triton.next_power_of_2(D), STEPS=triton.next_power_of_2(P), num_warps=4,
        **overlap(keys.device),
    )  # fmt: skip
