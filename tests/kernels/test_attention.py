"""Attention over pages of KV against attention written out in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.attention import merge
from longspec.kernels import attention
from longspec.kernels.attention import attend
from longspec.kernels.merge import merge as merge_kernel
from tests.kernels.paged import DEVICE, DTYPES, exact, places, random_tables

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 3e-2}
# B, T, K, G, D, the entries of a page, and the rows' lengths: odd sizes, empty prefixes, lengths just below,
# at and above a page's end, nodes that begin in one page and end in another.
SHAPES = [
    (1, 1, 3, 3, 64, 128, [0]),
    (3, 1, 2, 1, 64, 128, [127, 128, 1]),
    (1, 37, 1, 5, 32, 128, [0]),
    (4, 9, 2, 3, 64, 128, [126, 0, 255, 257]),
    (2, 65, 1, 1, 128, 256, [70, 510]),
    (1, 9, 1, 8, 256, 128, [300]),
    (2, 3, 1, 7, 96, 128, [128, 384]),
]


def random_tree(num_nodes: int, generator: torch.Generator) -> Tensor:
    """Ancestor mask of a random tree, itself included."""
    sees = torch.eye(num_nodes, dtype=torch.bool)
    for node in range(1, num_nodes):
        sees[node] |= sees[int(torch.randint(node, (), generator=generator))]
    return sees


def visible(length: int, T: int, tree: Tensor | None, sinks: int, window: int | None, nodes: bool) -> Tensor:
    entry = torch.arange(length)
    prefix = torch.ones(T, length, dtype=torch.bool)
    if window is not None:
        prefix &= (entry < sinks) | (entry >= length - window)
    own = torch.ones(T, T, dtype=torch.bool).tril() if tree is None else tree
    return torch.cat((prefix, own if nodes else torch.zeros_like(own)), 1)


def check(
    shape: tuple[int, int, int, int, int, int, list[int]],
    dtype: torch.dtype,
    kind: str,
    splits: int | None = None,
    capacity: int = 0,
) -> None:
    B, T, K, G, D, page, lengths = shape
    generator = torch.Generator().manual_seed(B * T + D)
    tables, num_pages = random_tables([length + T for length in lengths], page, generator)
    tables = F.pad(tables, (0, max(0, capacity // page - tables.shape[1])))
    q = torch.randn(B, T, K * G, D, generator=generator).to(DEVICE, dtype)
    k, v = torch.randn(2, K, num_pages * page, D, generator=generator).to(DEVICE, dtype).unbind(0)
    # What belongs to nobody is nan, but in page 0.
    used = torch.cat([places(tables, b, length + T, page) for b, length in enumerate(lengths)])
    nobody = torch.ones(num_pages * page, dtype=torch.bool, device=DEVICE)
    nobody[used] = nobody[:page] = False
    k[:, nobody] = v[:, nobody] = torch.nan
    trees = torch.stack([random_tree(T, generator) for _ in range(B)])
    tree = {"tree": trees[0], "trees": trees}.get(kind)
    sinks, window = {"window": (2, 50), "wide": (130, 127)}.get(kind, (0, None))
    given = (torch.tensor(lengths, device=DEVICE), tables, page, None if tree is None else tree.to(DEVICE))
    for nodes in (True, False):
        out, lse = attend(q, k, v, *given, nodes, sinks, window, num_splits=splits)
        assert out.dtype == dtype
        for b, length in enumerate(lengths):
            mine = tree[b] if tree is not None and tree.ndim == 3 else tree
            sees = visible(length, T, mine, sinks, window, nodes).to(DEVICE)
            at = places(tables, b, length + T, page)
            true_out, true_lse = exact(q[b], k[:, at], v[:, at], sees)
            bound = TOLERANCE[dtype]
            torch.testing.assert_close(out[b].double(), true_out, atol=bound, rtol=bound)
            torch.testing.assert_close(lse[b].double(), true_lse, atol=max(1e-4, bound), rtol=1e-3)


# In fp32 all kinds; the other types change tiles and tolerance only.
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *((torch.float32, kind) for kind in ("chain", "trees", "window", "wide")),
        *((dtype, kind) for dtype in DTYPES[1:] for kind in ("trees", "wide")),
    ],
    ids=str,
)
def test_attention_over_pages(
    shape: tuple[int, int, int, int, int, int, list[int]], dtype: torch.dtype, kind: str
) -> None:
    check(shape, dtype, kind)


@pytest.mark.parametrize("kind", ["tree", "window", "wide"])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_pages_that_the_hardware_does_not_copy(
    monkeypatch: pytest.MonkeyPatch, kind: str, splits: int
) -> None:
    """As before Hopper; and parts of any number."""
    monkeypatch.setattr(attention, "copies_tiles", lambda device: False)
    check((4, 5, 2, 3, 64, 128, [126, 0, 255, 400]), torch.float16, kind, splits)


@pytest.mark.parametrize("kind", ["chain", "window"])
def test_short_rows_where_long_ones_would_fit(kind: str) -> None:
    """Then rows are cut into parts, most of which are empty here, and tiles are smaller."""
    check((9, 1, 2, 4, 128, 128, [0, 1, 63, 64, 65, 128, 700, 3, 190]), torch.float16, kind, capacity=70000)


def test_heads_of_several_layers() -> None:
    """Every second layer of five, and pages as small as a tile of fp32."""
    generator = torch.Generator().manual_seed(0)
    B, T, K, G, D, page, lengths = 2, 3, 2, 2, 32, 16, [15, 49]
    tables, num_pages = random_tables(lengths, page, generator)
    k, v = torch.randn(2, 5, K, num_pages * page, D, generator=generator).to(DEVICE)[:, ::2].unbind(0)
    q = torch.randn(B, T, 3 * K * G, D, generator=generator).to(DEVICE)
    out, lse = attend(q, k, v, torch.tensor(lengths, device=DEVICE), tables, page, None, False)
    for b, length in enumerate(lengths):
        at = places(tables, b, length, page)
        for layer, heads in enumerate(q[b].chunk(3, 1)):
            sees = torch.ones(T, length, dtype=torch.bool, device=DEVICE)
            true_out, true_lse = exact(heads, k[layer][:, at], v[layer][:, at], sees)
            ours = slice(layer * K * G, (layer + 1) * K * G)
            torch.testing.assert_close(out[b, :, ours].double(), true_out, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(lse[b, :, ours].double(), true_lse, atol=1e-4, rtol=1e-3)


def test_merging_is_what_torch_gives() -> None:
    """Odd sizes, in two types, and rows that saw nothing on one side or on both."""
    for dtype in (torch.float32, torch.float16):
        sides = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            out, lse = torch.randn(3, 7, 5, 24, device=DEVICE).to(dtype), torch.randn(3, 7, 5, device=DEVICE)
            lse[:, :seed] = -torch.inf
            out[:, :seed] = 0
            sides.append((out, lse))
        found, expected = merge_kernel(*sides), merge(*sides)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-3 if dtype == torch.float16 else 1e-6, rtol=1e-3)
