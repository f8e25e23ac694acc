"""The Triton kernels for real: every shape that models have, against fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from longspec.attention import choose_backend
from longspec.attention.reference import ReferenceAttention

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
        S = max(lengths) + T + 3
        q = torch.randn(B, T, K * G, D, device=GPU).to(dtype)
        k, v = (torch.randn(B, K, S, D, device=GPU).to(dtype) for _ in range(2))
        for row, length in enumerate(lengths):
            k[row, :, length + T :] = v[row, :, length + T :] = torch.nan
        trees = [None, random_tree(T), torch.stack([random_tree(T) for _ in range(B)])]
        tree = trees[(index + G) % 3]
        for window in ((0, None), (3, 100)):
            plan = attention.plan(torch.tensor(lengths, device=GPU), T, tree, *window)
            for method in ("attend", "prefix"):
                result = getattr(attention, method)(q, k, v, plan)
                true = getattr(exact, method)(q.double(), k.double(), v.double(), plan)
                check(result, true, dtype)
        sees = torch.rand(B, T, S, device=GPU) < 0.5
        sees[:, :, 0] = True
        k, v = k.nan_to_num(), v.nan_to_num()
        check(attention.masked(q, k, v, sees), exact.masked(q.double(), k.double(), v.double(), sees), dtype)


def check(result: tuple[Tensor, Tensor], true: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    assert result[0].dtype == dtype
    for one, other in zip(result, true, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_cache_beyond_32_bits() -> None:
    """The last rows and heads of 2.2e9 elements, and of a view into a cache of several layers."""
    B, K, S, D, T = 2, 8, 540_000, 256, 5
    assert B * K * S * D > 2**31
    k, v = (torch.empty(B, K, S, D, device=GPU, dtype=torch.float16) for _ in range(2))
    for buffer in (k, v):
        for head in buffer.flatten(0, 1):
            head.normal_()
    q = torch.randn(B, T, 2 * K, D, device=GPU, dtype=torch.float16)
    lengths = torch.tensor([S - T - 1, S - T], device=GPU)
    backend, exact = choose_backend("triton"), ReferenceAttention(torch.float64)
    out, lse = backend.attend(q, k, v, backend.plan(lengths, T))
    for row, head in itertools.product(range(B), (0, K - 1)):
        queries = slice(2 * head, 2 * head + 2)
        one = (slice(row, row + 1), slice(head, head + 1))
        plan = exact.plan(lengths[row : row + 1], T)
        true = exact.attend(q[row : row + 1, :, queries].double(), k[one], v[one], plan)
        check((out[row : row + 1, :, queries], lse[row : row + 1, :, queries]), true, torch.float16)


def test_attention_is_captured_in_a_graph() -> None:
    """Replayed with other lengths, the graph gives what a call does: nothing was read on the host."""
    q = torch.randn(2, 9, 8, 64, device=GPU, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 4, 3000, 64, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    lengths, tree = torch.tensor([10, 20], device=GPU), random_tree(9)
    backend = choose_backend("triton")

    def run() -> tuple[Tensor, Tensor]:
        plan = backend.plan(lengths, 9, tree)
        return backend.attend(q, k, v, plan)[0], backend.prefix(q, k, v, plan)[0]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for now in ([0, 2991], [1500, 1], [2048, 128]):
        lengths.copy_(torch.tensor(now))
        graph.replay()
        for one, other in zip(captured, run(), strict=True):
            assert torch.equal(one, other)
