"""Products of few rows, and the work around them, against the same in fp64 and by separate operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.kernels.embed import embed
from longspec.kernels.linear import few_rows, folds
from longspec.kernels.norm import Residual
from tests.kernels.paged import DEVICE, DTYPES
from tests.kernels.test_fused import TOLERANCE

# R, I and O: rows, numbers in and out, one row and several, none of them a whole number of tiles; deep ones
# that the hardware can copy in whole tiles, and one that it cannot.
SIZES = [
    *((1, 576, 960), (1, 4100, 24), (7, 48, 33), (7, 33, 40), (20, 100, 2100), (20, 104, 2100)),
    *((64, 256, 64), (5, 1100, 24), (40, 1100, 24), (40, 1104, 24), (20, 4360, 24)),
]


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
    out, total = few_rows(Residual(x, delta), weight, bias, (norm, 1e-5))
    assert torch.equal(total.x, x + delta)
    normed = F.rms_norm(total.x.double(), (I,), norm.double(), 1e-5)
    draw.close(out.x, normed @ weight.double().T + bias.double())
    out, same = few_rows(Residual(x), weight)
    assert same.x is x
    draw.close(out.x, x.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("R", "I", "O"), SIZES)
def test_gated_products(dtype: torch.dtype, R: int, I: int, O: int) -> None:  # noqa: E741
    draw = Draws(dtype, R)
    x, gate_up, bias = draw(1, R, I), draw.matrix(2 * O, I), draw(2 * O)
    out, _ = few_rows(Residual(x), gate_up, bias, gated=True)
    gate, up = (x.double() @ gate_up.double().T + bias.double()).chunk(2, -1)
    draw.close(out.x, F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("R", "I", "O"), SIZES)
def test_products_added_to_the_stream(dtype: torch.dtype, R: int, I: int, O: int) -> None:  # noqa: E741
    """Rounded as two operations round, to the last bit."""
    draw = Draws(dtype, R)
    x, weight, bias, stream = draw(1, R, I), draw.matrix(O, I), draw(O), 30 * draw(1, R, O)
    product, _ = few_rows(Residual(x), weight, bias)
    assert torch.equal(few_rows(Residual(x), weight, bias, residual=stream)[0].x, stream + product.x)


# fp16 may overflow where the norm comes late.
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float16], ids=str)
@pytest.mark.parametrize(
    ("R", "I", "E", "O"),
    [
        *((7, 48, 33, 40), (7, 48, 40, 33), (20, 100, 2100, 24), (20, 104, 2100, 24), (64, 256, 64, 96)),
        (20, 4360, 72, 24),  # several programs share the first product
        # Qwen2.5-0.5B's, whose second product is not small; the interpreter would be too slow for them.
        *(((20, 4864, 896, 4864), (64, 64, 896, 4864)) if DEVICE.type == "cuda" else ()),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_between_two_products(
    dtype: torch.dtype,
    R: int,
    I: int,  # noqa: E741
    E: int,
    O: int,  # noqa: E741
    gated: bool,
) -> None:
    """What the norm needs is made by the product before it, whose result need not be normed to begin with."""
    draw = Draws(dtype, R)
    x, stream, norm = draw(1, R, I), 30 * draw(1, R, E), (draw(E), 1e-5)
    first, second, bias = (
        draw.matrix(E, I),
        draw.matrix(2 * O if gated else O, E),
        draw(2 * O if gated else O),
    )
    assert folds(R, second, exact=False)
    middle, _ = few_rows(Residual(x), first, residual=stream, factor=norm[0])
    assert torch.equal(middle.x, few_rows(Residual(x), first, residual=stream)[0].x)
    out, same = few_rows(middle, second, bias, norm, gated)
    assert same is middle
    exact = F.rms_norm(middle.x.double(), (E,), norm[0].double(), 1e-5) @ second.double().T + bias.double()
    if gated:
        exact = F.silu(exact[..., :O]) * exact[..., O:]
    draw.close(out.x, exact)


@pytest.mark.parametrize("E", [48, 1100])
def test_a_norm_of_embedded_tokens(E: int) -> None:
    draw = Draws(torch.float32, E)
    table, added, norm, weight = draw(50, E), draw(2, 1, E), (draw(E), 1e-5), draw.matrix(64, E)
    tokens = torch.randint(50, (2, 5), generator=torch.Generator().manual_seed(E)).to(DEVICE)
    stream, total = embed(tokens, table, added, norm[0])
    assert torch.equal(stream.x, table[tokens])
    assert torch.equal(total.x, table[tokens] + added)
    out, _ = few_rows(stream, weight, norm=norm)
    exact = F.rms_norm(table[tokens].double(), (E,), norm[0].double(), 1e-5) @ weight.double().T
    draw.close(out.x, exact)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32], ids=str)
def test_a_row_gives_the_same_among_others_as_alone(dtype: torch.dtype) -> None:
    """A norm that is rounded elsewhere would change every second number by one rounding."""
    draw = Draws(dtype, 0)
    table, norm, weight = draw(9, 576), (draw(576), 1e-5), draw.matrix(960, 576)
    tokens = torch.arange(9, device=DEVICE)[None]
    factor = norm[0] if folds(9, weight, exact=False) else None
    among = few_rows(embed(tokens, table, factor=factor)[0], weight, norm=norm)[0].x
    alone = [few_rows(Residual(table[None, row : row + 1]), weight, norm=norm)[0].x for row in range(9)]
    assert (among == torch.cat(alone, 1)).double().mean() > 0.98
