"""Matrix products of a few rows, fused with norm, gate and residual.

A product of few rows takes as long as loading its weights, and in a small model less than the launches around
it. So a kernel fetches weights before its turn: all weights of a small matrix, because any that are missing
would delay its end. The gate of a feed-forward and the residual are part of the product's launch. In a small
model the RMSNorm has no launch of its own either (`longspec.kernels.products`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longspec.kernels.eight_bit import one_row_of_bytes
from longspec.kernels.launch import overlap
from longspec.kernels.norm import MOST_ROWS, Ahead, Norm, Residual, most_rows, norm_stream
from longspec.kernels.planes import make_planes, multiply_planes, uses_planes
from longspec.kernels.products import (
    GROUP,
    LINE,
    count_lines,
    count_shares,
    few_tile_rows,
    is_small,
    room_for_shares,
    row_kernel,
    rows_kernel,
    split_kernel,
)
from longspec.kernels.tiling import can_copy_rows, copies_tiles, gpu_size, precision
from longspec.kernels.widen import convert

# The longest row that fits in one tile.
_LONGEST = 8192
# The most rows that our kernels multiply with weights of 8 bits.
_MOST_ROWS_OF_BYTES = 256


def few_rows(
    x: Residual,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    factor: Tensor | None = None,
    exact: bool = False,
    dtype: torch.dtype | None = None,
    scales: Tensor | None = None,
) -> tuple[Residual, Residual]:
    """x @ weight.T + bias; and the complete x [..., in].

    With `norm` it is the product of the normed x; only then may x have a `delta`. With `gated` the product is
    gate and up side by side, and the result is silu(gate) * up. `residual` [..., out] is added to the result.
    With `factor`, the weight of the norm that follows, the result has `ahead`, except by planes. If `exact`,
    the bits of a row do not depend on the other rows. The result has this `dtype`, or that of x. A weight of
    8 bits has `scales`, fp32 [out, runs]: a row of it has one for each of its runs of equal length.
    """
    assert x.delta is None or norm is not None, "only a norm adds the delta of x"
    value = x.x.contiguous()
    num_in = weight.shape[1]
    if scales is not None and not exact and value.numel() == num_in and factor is None:
        if norm is not None and (x.delta is not None or not _folds(value.dtype)):
            value, x = norm_stream(x, norm)
            norm = None
        out = one_row_of_bytes(value, weight, scales, bias, norm, gated, residual, dtype)
        return Residual(out), x
    if scales is not None and uses_planes(value.dtype, weight, scales):
        # Without `ahead`: the norm's launch is there anyway if planes follow.
        planes, x = make_planes(x, norm)
        out = multiply_planes(planes, weight, scales, bias, gated, residual, dtype or value.dtype)
        return Residual(out.view(*value.shape[:-1], -1)), x
    if scales is None and not exact and value.numel() == num_in <= _LONGEST and is_small(weight, 1):
        return _one_row(Residual(value, x.delta), weight, bias, norm, gated, residual)
    squares = None
    if norm is not None and x.ahead is not None:
        assert x.ahead.factor is norm[0], "`ahead` was made for another norm"
        value, squares = x.ahead.scaled, x.ahead.squares
    elif norm is not None:
        value, x = norm_stream(x, norm)
    eps = 0.0 if norm is None else norm[1]
    out, ahead = _several_rows(
        value, squares, weight, scales, bias, eps, gated, residual, factor, exact, dtype
    )  # fmt: skip
    return Residual(out, ahead=ahead), x


def _one_row(
    x: Residual,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    gated: bool,
    residual: Tensor | None,
) -> tuple[Residual, Residual]:
    num_out, num_in = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    value = x.x
    out = torch.empty(*value.shape[:-1], num_out, dtype=value.dtype, device=value.device)
    total = value if x.delta is None else torch.empty_like(value)
    depth = triton.next_power_of_2(num_in)
    cols = max(1, min(8, (8192 if gated else 16384) // depth))
    row_kernel[(triton.cdiv(num_out, cols),)](
        value, value if x.delta is None else x.delta.contiguous(), value if norm is None else norm[0],
        weight, value if bias is None else bias, value if residual is None else residual.contiguous(),
        out, total, num_in, num_out, 0.0 if norm is None else norm[1],
        COLS=cols, DEPTH=depth, ADD=x.delta is not None, NORM=norm is not None, LATE=_folds(value.dtype),
        GATED=gated, BIAS=bias is not None, RESIDUAL=residual is not None, num_warps=4,
        **overlap(value.device),
    )  # fmt: skip
    return Residual(out), Residual(total)


def _several_rows(
    value: Tensor,
    squares: Tensor | None,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
    factor: Tensor | None,
    exact: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Ahead | None]:
    """With `squares`, value is `Ahead.scaled`."""
    num_out, num_in = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    num_rows = value.numel() // num_in
    out = torch.empty(*value.shape[:-1], num_out, dtype=dtype or value.dtype, device=value.device)
    run = 0 if scales is None or scales.shape[1] == 1 else num_in // scales.shape[1]
    if scales is None:
        tile = _tile(num_rows, weight, gated, exact)
    else:
        tile = tile_of_bytes(num_rows, weight, value.dtype, gated, exact, run)
    num_shares = count_shares(num_in, tile.depth, tile.num_shares)
    grid = (triton.cdiv(num_out, tile.num_cols), triton.cdiv(num_rows, tile.num_rows), num_shares)
    made = triton.cdiv(num_out, GROUP.value) if exact else grid[0]
    ahead = None if factor is None else Ahead.empty(factor, out, made)
    num_parts = 1 if squares is None else len(squares)
    options = {
        "ROWS": tile.num_rows, "COLS": tile.num_cols, "DEPTH": tile.depth, "MOST": most_rows(num_rows),
        "LINE": LINE // weight.itemsize, "LINES": count_lines(weight), "NORM": squares is not None,
        "GATED": gated, "BIAS": bias is not None, "RESIDUAL": residual is not None,
        "AHEAD": ahead is not None, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
        "maxnreg": tile.num_registers, **overlap(value.device),
    }  # fmt: skip
    added = value if residual is None else residual.contiguous()
    around = (value if bias is None else bias, added, *(ahead or (out, out, out)), out)
    sizes, sums = (num_rows, num_parts, num_in, num_out, eps), value if squares is None else squares
    if tile.num_splits > 1:
        split_kernel[grid](
            value, sums, weight, *around, *sizes,
            SPLIT=tile.num_splits, PARTS=triton.next_power_of_2(num_parts), **options,
        )  # fmt: skip
        return out, ahead
    x_box, weight_box = value, weight
    if boxes := tile.boxes and can_copy_rows(weight):
        x_box = TensorDescriptor.from_tensor(value.view(num_rows, num_in), [tile.num_rows, tile.depth])
        weight_box = TensorDescriptor.from_tensor(weight, [tile.num_cols, tile.depth])
    assert num_shares == 1 or not gated, "only the sums of one product are added up"
    assert num_shares == 1 or squares is None, "each program would see the squares of its share only"
    shares = room_for_shares(grid, tile.num_rows * tile.num_cols, out, torch.float32)
    at_once = num_parts if exact else triton.cdiv(num_parts, triton.cdiv(num_in, tile.depth))
    parts = triton.next_power_of_2(at_once)
    rows_kernel[grid](
        value, x_box, sums, weight, weight_box, sums if scales is None else scales, *around, *shares,
        *sizes, SHARES=num_shares, SCALED=scales is not None, RUN=run,
        CONVERT=convert(value.device) if tile.by_warp_groups else 0,
        PARTS=parts, LEVELS=parts.bit_length() - 1, BOXES=boxes, EXACT=exact,
        PRECISION=precision(value.dtype), **options,
    )  # fmt: skip
    return out, ahead


@dataclass(frozen=True)
class Tile:
    """A program's share of a product."""

    num_rows: int
    num_cols: int
    depth: int
    """How much of the inner dimension each split reads at a time."""
    num_stages: int
    """How many such reads are in flight."""
    num_warps: int
    num_splits: int = 1
    """The number of parts of the inner dimension, which one program computes at the same time."""
    boxes: bool = False
    """Whether the hardware copies whole tiles."""
    num_shares: int = 1
    """How many programs share the inner dimension. The last one of a tile adds up their sums. Gate and up are
    not shared."""
    num_registers: int | None = None
    """The most that a thread may have, where the compiler would take more; fewer let more programs run."""

    @property
    def by_warp_groups(self) -> bool:
        """Whether four warps multiply weights of 8 bits together (Hopper's wgmma). Then a thread holds pairs
        of them, otherwise fours."""
        return self.num_cols >= 64 and self.num_rows >= 16 and self.num_warps % 4 == 0


def _tile_rows(num_rows: int, weight: Tensor, exact: bool) -> tuple[int, int]:
    """The number of rows by which a tile is chosen, and the rows of the tile if they are few. In the
    interpreter, `exact` has one tile for any number of rows, because the bits of numpy's products depend on
    it."""
    if exact and not weight.is_cuda:
        num_rows = MOST_ROWS
    return num_rows, few_tile_rows(num_rows)


def _tile(num_rows: int, weight: Tensor, gated: bool, exact: bool) -> Tile:
    """The tile that was fastest on an H200, reduced to what the GPU can hold. If `exact`, the depth is not
    split."""
    num_rows, rows = _tile_rows(num_rows, weight, exact)
    sms, shared = gpu_size(weight.device)
    # If all tiles of 32 columns run at once, each needs more reads in flight.
    few, deep = weight.shape[0] <= 32 * sms, weight.shape[1] > 1024
    boxes = copies_tiles(weight.device)
    if weight.dtype == torch.float32:
        tile = Tile(rows, 16, 32, 4, 4)
    elif exact and num_rows > MOST_ROWS:
        tile = _filling_tile(num_rows, weight, gated)
    elif exact and rows == 16:
        tile = Tile(16, 32, 256, 4, 4)
    elif exact and rows == 64 and weight.shape[0] > 256 * sms:
        tile = Tile(64, 64, 64, 6, 4, boxes=boxes)
    elif is_small(weight) and rows == 16:
        tile = Tile(16, 16, 128 if deep else 64, 4, 4, num_splits=4)
    elif is_small(weight) and boxes and rows == 32 and weight.shape[1] > 4096 and not (exact or gated):
        tile = Tile(32, 16, 256, 4, 4, boxes=True, num_shares=3)
    # Copies by the hardware skip rows that do not exist, but take longer to start.
    elif is_small(weight) and boxes and (deep or rows == 32):
        tile = Tile(64, 16, 256, 5, 4, boxes=True) if deep else Tile(64, 16, 128, 4, 4, boxes=True)
    elif is_small(weight):
        tile = Tile(rows, 16, 128, 4, 4)
    elif rows == 16:
        tile = Tile(16, 32, 256, 6 if few else 4, 4)
    elif rows == 32:
        tile = Tile(32, 32, 256, 5, 4) if few else Tile(32, 64, 128, 4, 4)
    # With fewer than 64 rows, the unused rows of the tile slow the product down. They cost least if the
    # hardware copies whole tiles.
    elif few:
        tile = Tile(64, 32, 128, 6, 4, boxes=boxes)
    elif gated and weight.shape[0] < 128 * sms:
        # Tiles of 64 columns would leave multiprocessors without work. With 3 reads in flight, two programs
        # fit on each.
        tile = Tile(64, 32, 128, 3, 4, boxes=boxes)
    else:
        tile = Tile(64, 64, 128, 4, 4, boxes=boxes)
    stage = (tile.num_rows + tile.num_cols * (2 if gated else 1)) * tile.depth * tile.num_splits
    return replace(tile, num_stages=max(1, min(tile.num_stages, shared // (stage * weight.itemsize))))


def _filling_tile(num_rows: int, weight: Tensor, gated: bool) -> Tile:
    """The tile for many rows: the largest size of which a product still has enough tiles for the GPU.

    Tiles of 128 x 128 must be enough for all multiprocessors, and twice as many if they also compute a gate.
    Of smaller tiles, enough for half of the multiprocessors was the fastest choice on an H200.
    """
    sms, _ = gpu_size(weight.device)
    num_cols = weight.shape[0] // (2 if gated else 1)
    boxes = copies_tiles(weight.device)
    sizes = (
        (Tile(128, 128, 64, 3, 8, boxes=boxes), 2 * sms if gated else sms),
        (Tile(128, 64, 64, 4, 4, boxes=boxes), sms // 2),
        (Tile(64, 64, 128, 4, 4, boxes=boxes), sms // 2),
    )
    for tile, least in sizes:
        if triton.cdiv(num_rows, tile.num_rows) * triton.cdiv(num_cols, tile.num_cols) >= least:
            return tile
    return Tile(64, 32, 128, 4, 4, boxes=boxes)


def tile_of_bytes(
    num_rows: int, weight: Tensor, dtype: torch.dtype, gated: bool, exact: bool, run: int
) -> Tile:
    """As `_tile`, for weights of 8 bits that are multiplied in `dtype`.

    Every tile of columns reads all rows, and 64 rows have the bytes of 128 columns, so tiles have many
    columns; where that makes few tiles, several programs share the depth of each. If `exact`, any number of
    rows has the same instruction and depth, and nothing is shared. The depth is at most a `run` of weights
    with one scale.
    """
    num_rows, rows = _tile_rows(num_rows, weight, exact)
    sms, shared = gpu_size(weight.device)
    if dtype == torch.float32:
        tile = Tile(rows, 16, 32, 4, 4)
    elif num_rows > MOST_ROWS:
        tile = Tile(64 if gated or run else 128, 128, 64, 4, 8)
    elif exact:
        tile = Tile(rows, 64, 64, 6, 4)
    elif is_small(weight):
        tile = Tile(rows, 16, 128, 4, 4)
    elif rows == 16:
        tile = Tile(16, 32, 256, 3 if gated else 4, 2)
    elif gated:
        tile = Tile(rows, 64, 128, 3, 4)
    else:
        tile = Tile(rows, 128, 128, 4, 8, boxes=copies_tiles(weight.device), num_registers=128)
    depth = min(tile.depth, run or tile.depth)
    num_cols = tile.num_cols * (2 if gated else 1)
    stage = (tile.num_rows * dtype.itemsize + num_cols) * depth
    num_stages = max(1, min(tile.num_stages, shared // stage))
    num_shares = 1
    if not (exact or gated or is_small(weight) or num_rows > MOST_ROWS or dtype == torch.float32):
        num_tiles = triton.cdiv(weight.shape[0], num_cols)
        num_shares = max(1, min(4 * sms // num_tiles, 4, weight.shape[1] // (2048 if rows == 16 else 512)))
    return replace(tile, depth=depth, num_stages=num_stages, num_shares=num_shares)


def covers(x: Tensor, weight: Tensor) -> bool:
    """Whether to use `few_rows` for this product."""
    num_rows = x.numel() // x.shape[-1]
    if is_small(weight, num_rows):
        return num_rows <= MOST_ROWS
    # Without tensor cores (a single row, or fp32) a library is faster with a large matrix.
    return 1 < num_rows <= MOST_ROWS and x.dtype != torch.float32


def covers_bytes(x: Tensor) -> bool:
    """Whether to use `few_rows` for a product with a weight of 8 bits. The limit is higher than for other
    weights, because without our kernels the weight must be expanded first."""
    return x.numel() // x.shape[-1] <= _MOST_ROWS_OF_BYTES


def folds(num_rows: int, weight: Tensor, exact: bool, dtype: torch.dtype | None = None) -> bool:
    """Whether the kernel that makes the stream should prepare for the norm of `few_rows` (`Ahead`), where
    products are in `dtype`, or in that of the weight."""
    # A single row's product computes the norm itself; next to a large product, a launch does not matter.
    # If exact, all rows are rounded at the same places.
    # The limit is that of one row, except for weights of 8 bits, which were not timed up to there.
    is_short = is_small(weight, 1) if weight.itemsize > 1 else is_small(weight)
    return (exact or 1 < num_rows <= MOST_ROWS) and is_short and _folds(dtype or weight.dtype)


def _folds(dtype: torch.dtype) -> bool:
    """Whether rows are scaled by the norm only after their product; in fp16 that could overflow."""
    return dtype != torch.float16
