"""Product, rope and cache write in one launch against the same in three."""

from __future__ import annotations

import pytest
import torch

from longspec.config import RopeConfig
from longspec.kernels.embed import embed
from longspec.kernels.heads import normed_heads
from longspec.kernels.linear import few_rows, folds
from longspec.kernels.norm import Stream
from longspec.kernels.rope import rope_write
from longspec.models.rope import RopeTable
from tests.kernels.test_fused import DEVICE, DTYPES, TOLERANCE
from tests.kernels.test_linear import Draws


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "H", "K", "D", "E"),
    [(2, 5, 9, 3, 64, 48), (1, 40, 2, 1, 96, 100), (3, 1, 6, 0, 32, 33), (1, 64, 1, 1, 128, 16)],
)
def test_heads_are_made_in_one_launch(
    dtype: torch.dtype, biased: bool, B: int, T: int, H: int, K: int, D: int, E: int
) -> None:
    draw, S = Draws(dtype, D), 2 * B * T
    rope = RopeTable(RopeConfig(), D).to(DEVICE)
    rope.reserve(100)
    generator = torch.Generator().manual_seed(D)
    tokens, positions = (torch.randint(60, (B, T), generator=generator).to(DEVICE) for _ in range(2))
    entries = torch.randperm(S, generator=generator)[: B * T].view(B, T).to(DEVICE)
    norm, weight = (draw(E), 1e-5), draw.matrix((H + 2 * K) * D, E)
    bias = draw(len(weight)) if biased else None
    stream, _ = embed(tokens, 3 * draw(60, E), factor=norm[0] if folds(B * T, weight) else None)
    # two layers of a larger cache
    (keys, true_keys), (values, true_values) = (
        torch.zeros(2, B, K, S, D, device=DEVICE, dtype=dtype) for _ in range(2)
    )
    q, same = normed_heads(stream, norm, weight, bias, rope.table, positions, entries, keys, values)
    assert same is stream
    qkv = few_rows(Stream(stream.x), weight, bias, norm)[0].x
    true_q = rope_write(qkv, rope.table, positions, entries, true_keys, true_values)
    bound = 4 * TOLERANCE[dtype]
    for one, other in ((q, true_q), (keys, true_keys), (values, true_values)):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, atol=bound, rtol=bound)
