"""Every backend against attention written out in fp64."""

from __future__ import annotations

import pytest
import torch

from longspec.attention import AttentionPlan, base, choose_backend, merge
from longspec.attention.reference import ReferenceAttention
from longspec.errors import UserError
from longspec.kernels import attention as kernels
from longspec.native.build import library
from tests.kernels.paged import places, random_tables

BACKENDS = [name for name in base.BACKENDS if name != "native" or library() is not None]
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
    page = 16 if D < 128 else 32
    tables, num_pages = random_tables([length + T for length in lengths], page, generator)
    q = torch.randn(B, T, K * G, D, generator=generator).to(dtype)
    # What lies behind the new tokens, or in nobody's page, is rubbish and must not be read.
    k, v = (torch.full((K, num_pages * page, D), torch.nan, dtype=dtype) for _ in range(2))
    for row, length in enumerate(lengths):
        held = places(tables, row, length + T, page)
        for x in (k, v):
            x[:, held] = torch.randn(K, len(held), D, generator=generator).to(dtype)
    tree = None
    if kind == "tree":
        tree = random_tree(T, generator)
    elif kind == "trees":
        tree = torch.stack([random_tree(T, generator) for _ in range(B)])
    exact, candidate = ReferenceAttention(torch.float64), choose_backend(backend)
    window = (2, 50) if kind == "window" else (0, None)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for method in ("attend", "prefix"):
        plan = AttentionPlan(torch.tensor(lengths), tables, page, T, tree, *window)
        out, lse = getattr(candidate, method)(q, k, v, plan)
        if T == 1:  # as a head's queries lie side by side
            beside = q.transpose(1, 2).contiguous().transpose(1, 2)
            assert torch.equal(getattr(candidate, method)(beside, k, v, plan)[0], out)
        true_out, true_lse = getattr(exact, method)(q.double(), k.double(), v.double(), plan)
        assert out.dtype == dtype
        assert out.shape == q.shape
        torch.testing.assert_close(out.double(), true_out, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse, true_lse, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_borders_of_pages_and_runs_of_them(backend: str) -> None:
    """Prefixes that end before, at and behind a page's border; pages in a row, reversed, and both."""
    K, D, T, page = 2, 32, 3, 16
    orders = [[1, 2, 3, 4], [8, 7, 6, 5], [9, 10, 12, 11], [16, 13, 14, 15]]
    tables = torch.tensor(orders, dtype=torch.int32)
    k, v = (torch.randn(2, K, 17 * page, D) for _ in range(2))
    q = torch.randn(4, T, 2 * K, D)
    for first in (0, page - T, page - 1, page, page + 1, 3 * page - 1):
        lengths = torch.tensor([first, first + 1, first, 4 * page - T])
        plan = AttentionPlan(lengths, tables, page, T)
        for method, keys in (("attend", (k[0], v[0])), ("prefix", (k[0], v[0])), ("prefix", (k, v))):
            true = getattr(ReferenceAttention(torch.float64), method)(q.double(), *keys, plan)
            for one, other in zip(
                getattr(choose_backend(backend), method)(q, *keys, plan), true, strict=True
            ):
                torch.testing.assert_close(one.double(), other.double(), atol=2e-5, rtol=2e-5)


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
    counts = torch.tensor([1, S])
    out, lse = choose_backend(backend).filled(q, k, v, counts)
    true_out, true_lse = ReferenceAttention(torch.float64).filled(q.double(), k.double(), v.double(), counts)
    torch.testing.assert_close(out.double(), true_out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, true_lse, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton"])
def test_nan_in_a_key_is_not_hidden(backend: str) -> None:
    k, v = torch.randn(2, 1, 48, 32)
    k[0, 5, 3] = torch.nan
    plan = AttentionPlan(torch.tensor([40]), torch.tensor([[0, 1, 2]], dtype=torch.int32), 16, 3)
    out, _ = choose_backend(backend).attend(torch.randn(1, 3, 2, 32), k, v, plan)
    assert out.isnan().all()


def test_merge_is_exact_and_ignores_what_saw_nothing() -> None:
    torch.manual_seed(0)
    exact = ReferenceAttention(torch.float64)
    q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)

    def over(start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        plan = AttentionPlan(torch.tensor([end - start]), torch.tensor([[0]]), 50, 4)
        return exact.prefix(q, k[0, :, start:end], v[0, :, start:end], plan)

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
