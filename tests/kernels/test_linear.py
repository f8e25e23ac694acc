"""Products of few rows, and the work around them, against the same in fp64 and by separate operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.kernels.linear import few_rows
from tests.kernels.test_fused import DEVICE, DTYPES, TOLERANCE

# R, I and O: rows, numbers in and out, one row and several, none of them a whole number of tiles.
SIZES = [(1, 576, 960), (1, 4100, 24), (7, 48, 33), (20, 100, 2100), (64, 256, 64)]


class Draws:
    """Random numbers of one type."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self._dtype, self._generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(DEVICE, self._dtype)

    def matrix(self, num_out: int, num_in: int) -> Tensor:
        return self(num_out, num_in) / num_in**0.5

    def close(self, one: Tensor, exact: Tensor) -> None:
        bound = 4 * TOLERANCE[self._dtype]
        assert one.dtype == self._dtype
        torch.testing.assert_close(one.double(), exact, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("R", "I", "O"), SIZES)
def test_products(dtype: torch.dtype, R: int, I: int, O: int) -> None:  # noqa: E741
    draw = Draws(dtype, R)
    x, delta, norm, bias = draw(1, R, I), draw(1, R, I), draw(I), draw(O)
    weight = draw.matrix(O, I)
    out, total = few_rows(x, weight, bias, delta, (norm, 1e-5))
    assert torch.equal(total, x + delta)
    normed = F.rms_norm(total.double(), (I,), norm.double(), 1e-5)
    draw.close(out, normed @ weight.double().T + bias.double())
    out, same = few_rows(x, weight)
    assert same is x
    draw.close(out, x.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("R", "I", "O"), SIZES)
def test_gated_products(dtype: torch.dtype, R: int, I: int, O: int) -> None:  # noqa: E741
    draw = Draws(dtype, R)
    x, gate_up, bias = draw(1, R, I), draw.matrix(2 * O, I), draw(2 * O)
    out, _ = few_rows(x, gate_up, bias, gated=True)
    gate, up = (x.double() @ gate_up.double().T + bias.double()).chunk(2, -1)
    draw.close(out, F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("R", "I", "O"), SIZES)
def test_products_added_to_the_stream(dtype: torch.dtype, R: int, I: int, O: int) -> None:  # noqa: E741
    """Rounded as two operations round, to the last bit."""
    draw = Draws(dtype, R)
    x, weight, bias, stream = draw(1, R, I), draw.matrix(O, I), draw(O), 30 * draw(1, R, O)
    assert torch.equal(few_rows(x, weight, bias, residual=stream)[0], stream + few_rows(x, weight, bias)[0])
