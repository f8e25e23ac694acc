"""The Triton kernels for real: every shape that models have, against fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longspec.attention import AttentionPlan, choose_backend
from longspec.attention.reference import ReferenceAttention
from longspec.kernels.linear import few_rows
from longspec.kernels.norm import Residual
from tests.kernels.paged import places, random_tables

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# T, and the rows' prefix lengths: N = 1 to 128 and beyond, empty prefixes, rows that differ widely
QUERIES = [
    (1, [0]),
    (1, [5000, 0, 77]),
    (2, [64]),
    (7, [0, 129]),
    (16, [1027]),
    (65, [131, 3000]),
    (128, [500]),
]
HEADS = list(itertools.product((64, 96, 128, 256), (1, 2, 3, 4, 5, 6, 7, 8)))


def random_tree(num_nodes: int) -> Tensor:
    """Ancestor mask of a random tree, itself included."""
    sees = torch.eye(num_nodes, dtype=torch.bool)
    for node in range(1, num_nodes):
        sees[node] |= sees[int(torch.randint(node, ()))]
    return sees.to(GPU)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("D", "G"), HEADS)
def test_attention_matches_fp64(backend: str, dtype: torch.dtype, D: int, G: int) -> None:
    torch.manual_seed(D + G)
    attention, exact = choose_backend(backend), ReferenceAttention(torch.float64)
    for index, (T, lengths) in enumerate(QUERIES):
        B, K = len(lengths), 1 + index % 3
        page = 64 if dtype == torch.float32 else 128
        generator = torch.Generator().manual_seed(index)
        tables, num_pages = random_tables([length + T for length in lengths], page, generator)
        q = torch.randn(B, T, K * G, D, device=GPU).to(dtype)
        # Nobody sees what is in no row's part of the pages.
        k, v = (torch.full((K, num_pages * page, D), torch.nan, device=GPU, dtype=dtype) for _ in range(2))
        for row, length in enumerate(lengths):
            held = places(tables, row, length + T, page)
            for x in (k, v):
                x[:, held] = torch.randn(K, len(held), D, device=GPU).to(dtype)
        trees = [None, random_tree(T), torch.stack([random_tree(T) for _ in range(B)])]
        tree = trees[(index + G) % 3]
        for window in ((0, None), (3, 100)):
            plan = AttentionPlan(torch.tensor(lengths, device=GPU), tables, page, T, tree, *window)
            for method in ("attend", "prefix"):
                result = getattr(attention, method)(q, k, v, plan)
                true = getattr(exact, method)(q.double(), k.double(), v.double(), plan)
                check(result, true, dtype)
        S = max(lengths) + T
        sees = torch.rand(B, T, S, device=GPU) < 0.5
        sees[:, :, 0] = True
        k, v = (torch.randn(B, K, S, D, device=GPU).to(dtype) for _ in range(2))
        check(attention.masked(q, k, v, sees), exact.masked(q.double(), k.double(), v.double(), sees), dtype)


def check(result: tuple[Tensor, Tensor], true: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    assert result[0].dtype == dtype
    for one, other in zip(result, true, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_pages_beyond_32_bits() -> None:
    """The last pages and heads of 2.2e9 elements."""
    K, D, T, page, S = 8, 256, 5, 128, 8500 * 128
    assert K * S * D > 2**31
    k, v = (torch.empty(K, S, D, device=GPU, dtype=torch.float16) for _ in range(2))
    for head in (*k, *v):
        head.normal_()
    q = torch.randn(2, T, 2 * K, D, device=GPU, dtype=torch.float16)
    # One row holds the last pages, the other pages from all over.
    tables = torch.stack((torch.arange(8372, 8500), torch.randperm(8400)[:128])).int().to(GPU)
    lengths = torch.tensor([128 * page - T, 128 * page - T - 1], device=GPU)
    backend, exact = choose_backend("triton"), ReferenceAttention(torch.float64)
    plan = AttentionPlan(lengths, tables, page, T)
    out, lse = backend.attend(q, k, v, plan)
    for head in (0, K - 1):
        queries, one = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        true = exact.attend(q[:, :, queries].double(), k[one], v[one], plan)
        check((out[:, :, queries], lse[:, :, queries]), true, torch.float16)


@torch.inference_mode()
def test_attention_is_captured_in_a_graph() -> None:
    """Replayed with other lengths and pages, the graph gives what a call does: the host was asked nothing."""
    q = torch.randn(2, 9, 8, 64, device=GPU, dtype=torch.bfloat16)
    k, v = (torch.randn(4, 60 * 128, 64, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    lengths, tree = torch.tensor([10, 20], device=GPU), random_tree(9)
    tables = torch.randperm(60, device=GPU).int()[:48].view(2, 24)
    backend = choose_backend("triton")

    def run() -> tuple[Tensor, Tensor]:
        plan = AttentionPlan(lengths, tables, 128, 9, tree.expand(2, -1, -1))
        return backend.attend(q, k, v, plan)[0], backend.prefix(q, k, v, plan)[0]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for now in ([0, 2991], [1500, 1], [2048, 128]):
        lengths.copy_(torch.tensor(now))
        tables.copy_(torch.randperm(60, device=GPU).int()[:48].view(2, 24))
        graph.replay()
        for one, other in zip(captured, run(), strict=True):
            assert torch.equal(one, other)


@torch.inference_mode()
def test_a_large_product_reads_what_attention_wrote() -> None:
    """The merge of a single query with wide heads lets the next kernel start late; a captured chain of
    attention and products must give what the same launches give one by one."""
    page, length, num_layers = 128, 4000, 12
    tables = torch.arange(32, device=GPU, dtype=torch.int32)[None]
    plan = AttentionPlan(torch.tensor([length], device=GPU), tables, page, 1)
    backend, x = choose_backend("triton"), torch.randn(1, 1, 4096, device=GPU, dtype=torch.bfloat16)
    caches = [torch.randn(2, 8, 32 * page, 128, device=GPU, dtype=torch.bfloat16) for _ in range(num_layers)]
    weight = torch.randint(-127, 128, (4096, 4096), device=GPU, dtype=torch.int8)
    scales = torch.full((4096, 1), 1e-4, device=GPU)

    def run(after_each: Callable[[], None]) -> Tensor:
        stream = x
        for k, v in caches:
            out = backend.attend(stream.view(1, 1, 32, 128), k, v, plan)[0].flatten(2)
            after_each()
            stream = few_rows(Residual(out), weight, residual=stream, scales=scales)[0].x
            after_each()
        return stream

    true = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(lambda: None)
    for _ in range(20):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, true)
