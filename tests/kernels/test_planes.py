"""Products with int8 weights by planes: as exact as rows of 16 bits, and the same bits for any tile and any
rows beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.kernels import planes
from longspec.kernels.linear import few_rows
from longspec.kernels.norm import Residual
from longspec.kernels.planes import PlaneTile, make_planes, tile_of_planes, uses_planes
from longspec.kernels.products import zero_counters
from longspec.models.eight_bit import EightBit, EightBitLinear
from tests.kernels.paged import DEVICE, DTYPES, ON_GPU
from tests.kernels.test_eight_bit import draw_bytes, expanded
from tests.kernels.test_linear import Draws

HALVES = [dtype for dtype in DTYPES if dtype != torch.float32]
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
# ||result - fp64|| / ||fp64||: a step of the rounded numbers is 1 / 32512 of the largest one of a row.
MOST_WRONG = 1e-4
SIZES = [(1, 576, 96), (1, 4100, 24), (1, 102, 33), (7, 48, 33), (20, 100, 40), (40, 272, 24), (66, 64, 40)]
TILES = [
    PlaneTile(16, 16, 32, 2, 4),
    PlaneTile(32, 64, 128, 3, 4, num_lines=16),
    PlaneTile(64, 128, 64, 4, 8),
    PlaneTile(16, 64, 128, 2, 4, num_shares=2),
    PlaneTile(64, 64, 64, 2, 4, num_shares=3),
    PlaneTile(32, 64, 32, 2, 4, num_shares=64, num_lines=32),
]


def use_tile(tile: PlaneTile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "tile_of_planes", lambda *sizes: tile)


def error(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("R", "I", "O"), SIZES)
def test_products_are_nearly_those_of_fp32(dtype: torch.dtype, exact: bool, R: int, I: int, O: int) -> None:  # noqa: E741
    draw = Draws(dtype, R)
    x, delta, norm = draw(1, R, I), draw(1, R, I), (draw(I), 1e-5)
    weight, scales = draw_bytes(torch.int8, O, I, 0, R)
    around: dict[str, Any] = {"scales": scales, "exact": exact, "dtype": torch.float32}
    true = expanded(weight, scales)
    assert error(few_rows(Residual(x), weight, **around)[0].x, x.double() @ true.T) < MOST_WRONG
    # A row alone that is long, or has a delta, has its norm rounded.
    most = MOST_WRONG if exact or R > 1 else 2 ** -(7 if dtype == torch.bfloat16 else 10)
    for stored in (Residual(x), Residual(x, delta)):
        out, total = few_rows(stored, weight, norm=norm, **around)
        assert torch.equal(total.x, x if stored.delta is None else x + delta)
        normed = F.rms_norm(total.x.double(), (I,), norm[0].double(), norm[1])
        assert error(out.x, normed @ true.T) < most


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_gives_the_same_bits(tile: PlaneTile, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draws(DTYPE, 1)
    R, I = (40, 272) if ON_GPU else (17, 80)  # noqa: E741
    x, norm, bias, stream = draw(1, R, I), (draw(I), 1e-5), draw(72), 30 * draw(1, R, 72)
    weight, scales = draw_bytes(torch.int8, 72, I, 0, 2)

    def products() -> list[Tensor]:
        found = few_rows(Residual(x), weight, bias, norm, residual=stream, scales=scales)[0].x
        wide = few_rows(Residual(x), weight, scales=scales, dtype=torch.float32)[0].x
        if tile.num_shares > 1:
            return [found, wide]
        return [found, wide, few_rows(Residual(x), weight, bias, norm, True, scales=scales)[0].x]

    expected = products()
    use_tile(tile, monkeypatch)
    for _ in range(min(2, tile.num_shares)):  # the second time, the counters must be at 0 again
        for one, other in zip(products(), expected, strict=True):
            assert torch.equal(one, other)
    assert not zero_counters(x.device).any()


@pytest.mark.parametrize("num_in", [4096 if ON_GPU else 128, 36])
def test_exact_rows_have_the_same_bits_alone_and_among_others(num_in: int) -> None:
    draw = Draws(DTYPE, 3)
    num_out = 6144 if ON_GPU else 48
    x, delta, norm = draw(1, 70, num_in), draw(1, 70, num_in), (draw(num_in), 1e-5)
    stream, (weight, scales) = draw(1, 70, num_out), draw_bytes(torch.int8, num_out, num_in, 0, 4)

    def products(rows: slice) -> list[Tensor]:
        some, added, beside = (part[:, rows].clone() for part in (x, delta, stream))
        return [
            few_rows(Residual(some), weight, residual=beside, exact=True, scales=scales)[0].x,
            few_rows(Residual(some, added), weight, norm=norm, exact=True, scales=scales)[0].x,
            few_rows(Residual(some), weight, norm=norm, gated=True, exact=True, scales=scales)[0].x,
        ]

    whole = products(slice(70))
    for rows in (slice(1), slice(5, 6), slice(2, 4), slice(20), slice(6, 70)):
        for some, every in zip(products(rows), whole, strict=True):
            assert torch.equal(some, every[:, rows])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rows_are_rounded_to_16_bits(dtype: torch.dtype) -> None:
    """A row of zeros, one with a number that is far larger than the others, and ordinary ones."""
    x = Draws(dtype, 5)(1, 4, 100)
    x[0, 0] = 0.0
    x[0, 1, 7] = -30000.0
    (values, scales), same = make_planes(Residual(x), None)
    assert same.x is x
    high, low = values.view(4, 2, 100).double().unbind(1)
    joined, step = 256 * high + low, scales.double()[:, None]
    assert joined.abs().amax(1).tolist() == [0, 32512, 32512, 32512]
    assert bool(((step * joined - x[0].double()).abs() <= 0.501 * step).all())


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_numbers_that_are_not_finite_stay_visible(num_rows: int, number: float) -> None:
    x = Draws(DTYPE, 5)(1, num_rows, 64)
    x[0, 0, 7] = number
    weight, scales = draw_bytes(torch.int8, 40, 64, 0, 1)
    found = few_rows(Residual(x), weight, scales=scales)[0].x
    assert bool(found[0, 0].isnan().all())
    assert bool(found[0, 1:].isfinite().all())


def test_planes_are_for_int8_with_a_scale_per_row_and_rows_in_half_precision() -> None:
    weight, scales = draw_bytes(torch.int8, 64, 64, 0, 1)
    assert uses_planes(DTYPE, weight, scales)
    assert not uses_planes(torch.float32, weight, scales)
    assert not uses_planes(DTYPE, weight, scales.expand(64, 2))
    assert not uses_planes(DTYPE, weight.to(torch.float8_e4m3fn), scales)
    # The launch of the norm makes planes; nothing is prepared for it.
    assert not EightBitLinear(EightBit(weight, scales), None, DTYPE).folds(7, True)
    assert EightBitLinear(EightBit(weight, scales), None, torch.float32).folds(7, True)


def test_a_product_of_planes_prepares_no_norm() -> None:
    draw = Draws(DTYPE, 7)
    x, stream, factor = draw(1, 7, 64), draw(1, 7, 96), draw(96)
    weight, scales = draw_bytes(torch.int8, 96, 64, 0, 1)
    found, _ = few_rows(Residual(x), weight, scales=scales, residual=stream, factor=factor)
    assert found.ahead is None


@pytest.mark.parametrize("num_rows", [2, 16, 32, 64, 256])
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_fit(num_rows: int, gated: bool) -> None:
    for num_out, num_in in ((96, 64), (4096, 4096), (28672, 4096), (128256, 64)):
        weight = torch.empty(num_out, num_in, dtype=torch.int8, device=DEVICE)
        tile = tile_of_planes(num_rows, weight, gated)
        assert tile.num_shares == 1 or not gated
        num_cols = tile.num_cols * (2 if gated else 1)
        assert (2 * tile.num_rows + num_cols) * tile.depth * tile.num_stages < 227 * 1024
