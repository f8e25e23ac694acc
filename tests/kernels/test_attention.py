"""Prefix and nodes in one launch, against attention written out in fp64."""

from __future__ import annotations

import pytest
import torch

from longspec.attention.reference import ReferenceAttention
from longspec.kernels import attention
from tests.attention.test_backends import SHAPES, random_tree
from tests.kernels.test_fused import DEVICE, DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] > 1], ids=str)
@pytest.mark.parametrize("kind", ["chain", "tree", "trees", "window"])
def test_a_short_prefix_in_one_launch(
    shape: tuple[int, int, int, int, int, list[int]],
    dtype: torch.dtype,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "SHORT", 1000)
    monkeypatch.delattr(attention, "_merge_kernel")  # a second launch would need it
    B, T, K, G, D, lengths = shape
    generator = torch.Generator().manual_seed(B * T + D)
    S = max(lengths) + T + 5
    q, k, v = (
        torch.randn(size, generator=generator).to(DEVICE, dtype)
        for size in ((B, T, K * G, D), (B, K, S, D), (B, K, S, D))
    )
    for row, length in enumerate(lengths):
        # what lies behind the new tokens is rubbish and must not be read
        k[row, :, length + T :] = v[row, :, length + T :] = torch.nan
    tree = None
    if kind == "tree":
        tree = random_tree(T, generator).to(DEVICE)
    elif kind == "trees":
        tree = torch.stack([random_tree(T, generator) for _ in range(B)]).to(DEVICE)
    window = (2, 50) if kind == "window" else (0, None)
    exact, ends = ReferenceAttention(torch.float64), torch.tensor(lengths, device=DEVICE)
    plan = exact.plan(ends, T, tree, *window)
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    out, lse = attention.attend(q, k, v, ends, tree, True, *window)
    true_out, true_lse = exact.attend(q.double(), k.double(), v.double(), plan)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), true_out, atol=bound, rtol=bound)
    torch.testing.assert_close(lse, true_lse, atol=10 * bound, rtol=1e-3)
