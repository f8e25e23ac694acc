"""Matrix products of a few rows, and the small work around them.

Of few rows a product takes as long as its weights take to come from memory, and in a small model less than
the launches around it. So weights are asked for before it is the kernel's turn, and of a small matrix all of
them: what is left would come when the product is nearly done, and be waited for. The gate of a feed-forward
is part of the product that makes it, and so is the residual that a product is added to. In a small model the
RMSNorm is no launch either (see `longspec.kernels.products`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longspec.kernels.launch import overlap
from longspec.kernels.norm import MOST_ROWS, Ahead, Norm, Stream, norm_stream
from longspec.kernels.products import row_kernel, rows_kernel, split_kernel
from longspec.kernels.tiling import copies_tiles, gpu_size, precision

# A single row of a small matrix is one tile.
_SMALL, _LONGEST = 1 << 22, 4096
_WHOLE = 16  # bytes that the hardware's copying of tiles takes rows by
# Bytes that come from memory together, and how many such of a large matrix's columns are asked for early.
_LINE, _LINES = 128, 8


def few_rows(
    x: Stream,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Stream, Stream]:
    """x @ weight.T + bias; and x [..., in] itself, with nothing lacking.

    With `norm` the product is that of the normed x, which alone may lack something. With `gated` the product
    is gate and up side by side, and silu(gate) * up is returned instead. With `residual` [..., out] what is
    returned has that added to it; with `factor`, the weight of a norm to come, it has `ahead` (see `folds`).
    """
    assert x.delta is None or norm is not None, "what x lacks is added by the norm that follows it"
    value = x.x.contiguous()
    num_in = weight.shape[1]
    if value.numel() == num_in <= _LONGEST and _is_small(weight):
        return _one_row(Stream(value, x.delta), weight, bias, norm, gated, residual)
    squares = None
    if norm is not None and x.ahead is not None:
        assert x.ahead.factor is norm[0], "what was made ahead was made for another norm"
        value, squares = x.ahead.scaled, x.ahead.squares
    elif norm is not None:
        value, x = norm_stream(x, norm)
    eps = 0.0 if norm is None else norm[1]
    out, ahead = _several_rows(value, squares, weight, bias, eps, gated, residual, factor)
    return Stream(out, ahead=ahead), x


def _one_row(
    x: Stream,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    gated: bool,
    residual: Tensor | None,
) -> tuple[Stream, Stream]:
    """See `few_rows`."""
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
    return Stream(out), Stream(total)


def _several_rows(
    value: Tensor,
    squares: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
    factor: Tensor | None,
) -> tuple[Tensor, Ahead | None]:
    """See `few_rows`; with `squares` the value is `Ahead.scaled`."""
    num_out, num_in = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    num_rows = value.numel() // num_in
    out = torch.empty(*value.shape[:-1], num_out, dtype=value.dtype, device=value.device)
    tile = _tile(num_rows, weight, gated)
    grid = (triton.cdiv(num_out, tile.num_cols), triton.cdiv(num_rows, tile.num_rows))
    ahead = None if factor is None else Ahead.empty(factor, out, grid[0])
    num_parts = 1 if squares is None else len(squares)
    options = {
        "ROWS": tile.num_rows, "COLS": tile.num_cols, "DEPTH": tile.depth, "MOST": MOST_ROWS,
        "LINE": _LINE // value.itemsize, "LINES": _lines(weight), "NORM": squares is not None,
        "GATED": gated, "BIAS": bias is not None, "RESIDUAL": residual is not None,
        "AHEAD": ahead is not None, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
        **overlap(value.device),
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
    if boxes := tile.boxes and num_in * value.itemsize % _WHOLE == 0:
        x_box = TensorDescriptor.from_tensor(value.view(num_rows, num_in), [tile.num_rows, tile.depth])
        weight_box = TensorDescriptor.from_tensor(weight, [tile.num_cols, tile.depth])
    rows_kernel[grid](
        value, x_box, sums, weight, weight_box, *around, *sizes,
        PARTS=triton.next_power_of_2(triton.cdiv(num_parts, triton.cdiv(num_in, tile.depth))),
        BOXES=boxes, PRECISION=precision(value.dtype), **options,
    )  # fmt: skip
    return out, ahead


@dataclass(frozen=True)
class _Tile:
    """A program's share of a product."""

    num_rows: int
    num_cols: int
    depth: int
    """Of what is read at a time, by each split."""
    num_stages: int
    """How many of those are under way."""
    num_warps: int
    num_splits: int = 1
    """Into which the depth is cut."""
    boxes: bool = False
    """Whether the hardware copies whole tiles."""


def _tile(num_rows: int, weight: Tensor, gated: bool) -> _Tile:
    """What was fastest on an H200, cut down to what the GPU holds."""
    sms, shared = gpu_size(weight.device)
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    # Where tiles of 32 columns are few enough for all to run at once, each needs more under way.
    few, deep = weight.shape[0] <= 32 * sms, weight.shape[1] > 1024
    if weight.dtype == torch.float32:
        tile = _Tile(rows, 16, 32, 4, 4)
    elif _is_small(weight) and rows == 16:
        tile = _Tile(16, 16, 128 if deep else 64, 4, 4, num_splits=4)
    # The hardware's copying leaves out rows that are none, and takes longer to begin.
    elif _is_small(weight) and copies_tiles(weight.device) and (deep or rows == 32):
        tile = _Tile(64, 16, 256, 5, 4, boxes=True) if deep else _Tile(64, 16, 128, 4, 4, boxes=True)
    elif _is_small(weight):
        tile = _Tile(rows, 16, 128, 4, 4)
    elif rows == 16:
        tile = _Tile(16, 32, 256, 6 if few else 4, 4)
    else:
        tile = _Tile(rows, 32, 128, 6, 4) if few else _Tile(rows, 64, 128, 4, 4)
    stage = (tile.num_rows + tile.num_cols * (2 if gated else 1)) * tile.depth * tile.num_splits
    return replace(tile, num_stages=max(1, min(tile.num_stages, shared // (stage * weight.itemsize))))


def _lines(weight: Tensor) -> int:
    """How many lines of each column's weights are asked for early: of a small matrix, all."""
    every = triton.next_power_of_2(triton.cdiv(weight.shape[1] * weight.itemsize, _LINE))
    return every if _is_small(weight) else _LINES


def _is_small(weight: Tensor) -> bool:
    """Whether its product takes less time than the launches around it."""
    return weight.numel() <= _SMALL


def covers(x: Tensor, weight: Tensor) -> bool:
    """Whether `few_rows` is for this product."""
    num_rows = x.numel() // x.shape[-1]
    if _is_small(weight):
        return num_rows <= MOST_ROWS
    # A library does better by a large matrix where tensor cores do nothing: a single row, and fp32.
    return 1 < num_rows <= MOST_ROWS and x.dtype != torch.float32


def folds(num_rows: int, weight: Tensor) -> bool:
    """Whether `few_rows` of a normed stream wants it with what the norm needs made ahead."""
    # One row's norm is its product's own work; beside a large product, a launch does not matter.
    return 1 < num_rows <= MOST_ROWS and _is_small(weight) and _folds(weight.dtype)


def _folds(dtype: torch.dtype) -> bool:
    """Whether rows are scaled to a mean square of 1 behind their product: before that, fp16 may overflow."""
    return dtype != torch.float16
