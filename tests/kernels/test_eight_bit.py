"""Products of few rows with weights of 8 bits against the expanded weights, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.kernels import linear
from longspec.kernels.expand import expand
from longspec.kernels.linear import Tile, few_rows, folds
from longspec.kernels.norm import Residual
from longspec.kernels.products import zero_counters
from tests.kernels.paged import DEVICE, DTYPES, ON_GPU
from tests.kernels.test_linear import Draws

CAN_FP8 = not ON_GPU or torch.cuda.get_device_capability() >= (8, 9)
KINDS = [torch.int8, *([torch.float8_e4m3fn] if CAN_FP8 else [])]
# Off a GPU, two of the pairs, because the interpreter is slow.
PAIRS = [(dtype, kind) for dtype in DTYPES for kind in KINDS]
PAIRS = PAIRS if ON_GPU else [(torch.float32, torch.float8_e4m3fn), (torch.float16, torch.int8)]
# Rows, numbers in and out, and the numbers that share a scale (0: a whole row). One row in one tile and in
# parts; several rows in tiles of 16, 32, 64 and 128.
SIZES = [
    *((1, 576, 96, 0), (1, 100, 33, 0), (1, 5000, 24, 0), (1, 512, 40, 128), (1, 4224, 24, 128)),
    *((7, 48, 33, 0), (20, 256, 40, 128), (40, 336, 24, 0), (70, 96, 40, 32)),
]


def draw_bytes(kind: torch.dtype, num_out: int, num_in: int, run: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random weights of 8 bits, the largest and smallest among them, and their scales."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (num_out, num_in), generator=generator)
    weight = values.to(torch.int8) if kind == torch.int8 else (3.5 * values).to(kind)
    scales = torch.rand(num_out, num_in // run if run else 1, generator=generator) + 0.5
    scales /= num_in**0.5 * weight.float().std()
    return weight.to(DEVICE), scales.to(DEVICE)


def expanded(weight: Tensor, scales: Tensor) -> Tensor:
    runs = weight.float().double().unflatten(1, (scales.shape[1], -1))
    return (runs * scales.double()[:, :, None]).flatten(1)


@pytest.mark.parametrize(("dtype", "kind"), PAIRS, ids=str)
@pytest.mark.parametrize(("R", "I", "O", "run"), SIZES)
def test_products(dtype: torch.dtype, kind: torch.dtype, R: int, I: int, O: int, run: int) -> None:  # noqa: E741
    draw = Draws(dtype, R)
    x, delta, norm, bias, stream = draw(1, R, I), draw(1, R, I), (draw(I), 1e-5), draw(O), 30 * draw(1, R, O)
    weight, scales = draw_bytes(kind, O, I, run, R)
    true = expanded(weight, scales)
    product, same = few_rows(Residual(x), weight, scales=scales)
    assert same.x is x
    draw.close(product.x, x.double() @ true.T)
    # Rounded as two operations round, to the last bit; in fp32 the compiler may make one of them.
    sums, _ = few_rows(Residual(x), weight, scales=scales, residual=stream)
    if dtype == torch.float32:
        torch.testing.assert_close(sums.x, stream + product.x)
    else:
        assert torch.equal(sums.x, stream + product.x)
    wide, _ = few_rows(Residual(x), weight, scales=scales, dtype=torch.float32)
    assert wide.x.dtype == torch.float32
    torch.testing.assert_close(wide.x.double(), x.double() @ true.T, atol=1e-3, rtol=1e-3)
    for stored in (Residual(x), Residual(x, delta)):
        out, total = few_rows(stored, weight, bias, norm, scales=scales)
        assert torch.equal(total.x, x if stored.delta is None else x + delta)
        normed = F.rms_norm(total.x.double(), (I,), norm[0].double(), 1e-5)
        draw.close(out.x, normed @ true.T + bias.double())


@pytest.mark.parametrize(("dtype", "kind"), PAIRS, ids=str)
@pytest.mark.parametrize(("R", "I", "O", "run"), SIZES)
def test_gated_products(dtype: torch.dtype, kind: torch.dtype, R: int, I: int, O: int, run: int) -> None:  # noqa: E741
    draw = Draws(dtype, R)
    x, norm, bias = draw(1, R, I), (draw(I), 1e-5), draw(2 * O)
    weight, scales = draw_bytes(kind, 2 * O, I, run, R)
    true = expanded(weight, scales)
    out, _ = few_rows(Residual(x), weight, bias, norm, gated=True, scales=scales)
    gate, up = (F.rms_norm(x.double(), (I,), norm[0].double(), 1e-5) @ true.T + bias.double()).chunk(2, -1)
    draw.close(out.x, F.silu(gate) * up)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("tile", [None, Tile(16, 64, 64, 2, 4), Tile(8, 64, 64, 2, 4)], ids=str)
def test_every_byte_is_converted(
    kind: torch.dtype, tile: Tile | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile is not None:
        monkeypatch.setattr(linear, "tile_of_bytes", lambda *sizes: tile)
    values = torch.arange(256, dtype=torch.uint8)
    values = values[values.view(kind).float().isfinite()]
    # int8 is converted where a row has several scales.
    num_runs = 2 if kind == torch.int8 else 1
    weight, ones = torch.diag(values).view(kind), torch.ones(len(values), num_runs, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float16) if ON_GPU else (torch.float16,):
        rows = torch.ones(1, 1 if tile is None else 16, len(values), dtype=dtype, device=DEVICE)
        found = few_rows(Residual(rows), weight.to(DEVICE), scales=ones)[0].x
        assert torch.equal(found[0].float().cpu(), values.view(kind).float().expand(rows.shape[1], -1))


# int8 with a scale per row is in `test_planes`.
SHARED = [(kind, shares, 64) for kind in KINDS for shares in (2, 3)]
SHARED += [(kind, shares, 0) for kind in KINDS if kind != torch.int8 for shares in (2, 3, 16)]


@pytest.mark.parametrize(("kind", "num_shares", "run"), SHARED, ids=str)
def test_programs_share_the_depth(
    kind: torch.dtype, num_shares: int, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = Tile(16, 64, 64, 2, 4, num_shares=num_shares)
    monkeypatch.setattr(linear, "tile_of_bytes", lambda *sizes: tile)
    draw = Draws(torch.bfloat16 if ON_GPU else torch.float16, 3)
    x, bias, stream = draw(1, 20, 640), draw(72), 30 * draw(1, 20, 72)
    weight, scales = draw_bytes(kind, 72, 640, run, 6)
    expected = x.double() @ expanded(weight, scales).T + bias.double() + stream.double()
    first = few_rows(Residual(x), weight, bias, residual=stream, scales=scales)[0].x
    draw.close(first, expected)
    # The counters are at 0 again.
    assert torch.equal(few_rows(Residual(x), weight, bias, residual=stream, scales=scales)[0].x, first)
    assert not zero_counters(x.device).any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("num_in", "run"), [(100, 0), (96, 32), (5000, 0)])
def test_matrices_are_expanded(kind: torch.dtype, num_in: int, run: int) -> None:
    weight, scales = draw_bytes(kind, 7, num_in, run, 5)
    for dtype in DTYPES:
        found = expand(weight, scales, dtype)
        assert torch.equal(found, expanded(weight, scales).float().to(dtype))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("run", [0, 32])
def test_a_norm_between_two_products(kind: torch.dtype, run: int) -> None:
    draw = Draws(torch.float32, 7)
    x, stream, norm = draw(1, 7, 64), 30 * draw(1, 7, 96), (draw(96), 1e-5)
    first, second = draw_bytes(kind, 96, 64, run, 1), draw_bytes(kind, 80, 96, run, 2)
    assert folds(7, second[0], False, x.dtype)
    middle, _ = few_rows(Residual(x), first[0], scales=first[1], residual=stream, factor=norm[0])
    out, same = few_rows(middle, second[0], norm=norm, gated=True, scales=second[1])
    assert same is middle
    normed = F.rms_norm(middle.x.double(), (96,), norm[0].double(), 1e-5)
    gate, up = (normed @ expanded(*second).T).chunk(2, -1)
    draw.close(out.x, F.silu(gate) * up)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("run", [0, 128])
def test_exact_products_have_the_same_bits_alone_and_among_others(kind: torch.dtype, run: int) -> None:
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    draw = Draws(dtype, 3)
    num_in, num_out = (4096, 6144) if ON_GPU else (256, 48)
    x, (weight, scales) = draw(1, 70, num_in), draw_bytes(kind, num_out, num_in, run, 4)
    whole = few_rows(Residual(x), weight, scales=scales, exact=True)[0].x
    for count in (1, 9, 30, 64):
        some = few_rows(Residual(x[:, :count].contiguous()), weight, scales=scales, exact=True)[0].x
        assert torch.equal(some, whole[:, :count])
