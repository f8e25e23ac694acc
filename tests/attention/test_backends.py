"""Every backend against attention written out in fp64."""

from __future__ import annotations

import pytest
import torch

from longspec.attention import choose_backend, merge
from longspec.attention.base import BACKENDS
from longspec.attention.reference import ReferenceAttention
from longspec.errors import UserError
from longspec.kernels import attention as kernels

# B, T, K, G, D and the rows' prefix lengths: odd sizes, empty prefixes, one row and several
SHAPES = [
    (1, 1, 3, 3, 64, [0]),
    (1, 1, 1, 7, 96, [513]),
    (1, 37, 1, 5, 32, [0]),
    (3, 1, 2, 1, 64, [0, 1, 77]),
    (2, 65, 1, 1, 128, [70, 7]),
    (1, 9, 1, 8, 256, [70]),
    (3, 9, 2, 3, 64, [64, 0, 131]),
    (1, 5, 1, 3, 64, [510]),
]


def random_tree(num_nodes: int, generator: torch.Generator) -> torch.Tensor:
    """Ancestor mask of a random tree, itself included."""
    sees = torch.eye(num_nodes, dtype=torch.bool)
    for node in range(1, num_nodes):
        parent = int(torch.randint(node, (), generator=generator))
        sees[node] |= sees[parent]
    return sees


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["trees", "window"])
def test_attend_where_the_hardware_copies_no_tiles(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int, int, list[int]], kind: str
) -> None:
    """As before Hopper."""
    monkeypatch.setattr(kernels, "copies_tiles", lambda device: False)
    test_attend_matches_fp64("triton", shape, torch.float16, kind)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["chain", "tree", "trees", "window"])
def test_attend_matches_fp64(
    backend: str, shape: tuple[int, int, int, int, int, list[int]], dtype: torch.dtype, kind: str
) -> None:
    B, T, K, G, D, lengths = shape
    if backend == "triton" and dtype == torch.bfloat16:
        dtype = torch.float16  # Triton's interpreter, which runs here, is silently wrong for bf16
    generator = torch.Generator().manual_seed(B * T + D)
    S = max(lengths) + T + 5
    q = torch.randn(B, T, K * G, D, generator=generator).to(dtype)
    k = torch.randn(B, K, S, D, generator=generator).to(dtype)
    v = torch.randn(B, K, S, D, generator=generator).to(dtype)
    for row, length in enumerate(lengths):
        # what lies behind the new tokens is rubbish and must not be read
        k[row, :, length + T :] = v[row, :, length + T :] = torch.nan
    tree = None
    if kind == "tree":
        tree = random_tree(T, generator)
    elif kind == "trees":
        tree = torch.stack([random_tree(T, generator) for _ in range(B)])
    exact, candidate = ReferenceAttention(torch.float64), choose_backend(backend)
    window = (2, 50) if kind == "window" else (0, None)
    plan = candidate.plan(torch.tensor(lengths), T, tree, *window)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for method in ("attend", "prefix"):
        out, lse = getattr(candidate, method)(q, k, v, plan)
        true_out, true_lse = getattr(exact, method)(q.double(), k.double(), v.double(), plan)
        assert out.dtype == dtype
        assert out.shape == q.shape
        torch.testing.assert_close(out.double(), true_out, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse, true_lse, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("T", "K", "G", "D", "S"), [(1, 2, 3, 64, 40), (7, 1, 5, 96, 90), (17, 2, 1, 16, 7)])
def test_masked_matches_fp64(backend: str, T: int, K: int, G: int, D: int, S: int) -> None:
    generator = torch.Generator().manual_seed(T)
    q = torch.randn(2, T, K * G, D, generator=generator)
    k, v = (torch.randn(2, K, S, D, generator=generator) for _ in range(2))
    sees = torch.rand(2, T, S, generator=generator) < 0.3
    sees[:, :, 0] = True
    out, lse = choose_backend(backend).masked(q, k, v, sees)
    true_out, true_lse = ReferenceAttention(torch.float64).masked(q.double(), k.double(), v.double(), sees)
    torch.testing.assert_close(out.double(), true_out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, true_lse, atol=1e-4, rtol=1e-3)


def test_merge_is_exact_and_ignores_what_saw_nothing() -> None:
    torch.manual_seed(0)
    exact = ReferenceAttention(torch.float64)
    q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)

    def over(start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.tensor([end - start])
        return exact.prefix(q, k[:, :, start:end], v[:, :, start:end], exact.plan(lengths, 4))

    whole = over(0, 50)
    for cut in (1, 25, 49):
        out, lse = merge(over(0, cut), over(cut, 50))
        torch.testing.assert_close(out, whole[0])
        torch.testing.assert_close(lse, whole[1])
    nothing = over(0, 0)
    assert torch.isinf(nothing[1]).all()
    assert not nothing[0].any()
    for one, two in ((whole, nothing), (nothing, whole)):
        out, lse = merge(one, two)
        torch.testing.assert_close(out, whole[0])
        torch.testing.assert_close(lse, whole[1])
    out, lse = merge(nothing, nothing)
    assert not out.any()
    assert torch.isinf(lse).all()


def test_unknown_backend_is_named() -> None:
    with pytest.raises(UserError, match="'flash3' is unknown"):
        choose_backend("flash3")
