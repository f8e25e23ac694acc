"""What exact attention and products cost beside the fast ones, and whether attention's bits hold.

`python -m benchmarks.exact_costs` tries several ways to cut attention, for one query and for 64. The first
way is the one in use. Times are microseconds of one layer, as replayed in a CUDA graph over the keys, values
and weights of several layers. A result with other bits is marked with `!`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.attention import time_of
from benchmarks.shapes import SHAPES, random_target
from longspec.kernels import attention, exact
from longspec.kernels.attention import attend
from longspec.kernels.exact import Cut, Paths, attend_exactly, chain_paths, choose_cut
from longspec.kernels.launch import compile_for
from longspec.kernels.norm import Residual
from longspec.kernels.tiling import Tiling
from longspec.models.fused import FusedOps
from longspec.models.layers import Block, scores

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
_PAGE = 128
_CACHE = 1 << 28  # bytes of keys and values, or of weights: several times those of the GPU's cache
_MOST_COPIES = 240
_REPLAYS = 10

Work = Callable[[], object]


def microseconds(work: Work) -> float:
    """The median over replays of a CUDA graph."""
    if not ON_GPU:
        started = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - started)
    return 1e3 * time_of(work, _REPLAYS)


# ---- attention


@dataclass(frozen=True)
class Heads:
    """One layer's attention."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    contexts: tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """A way to compute exact attention."""

    name: str
    cut: Cut | None = None
    few: Tiling | None = None
    """The tiling for few rows, if another than usual."""
    many: Tiling | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.cut is not None:
                cut = self.cut
                stack.enter_context(patch.multiple(exact, choose_cut=lambda head_dim: cut))
            if self.many is not None:
                stack.enter_context(patch.multiple(exact, choose_tiling=self._tiling))
            yield

    def _tiling(self, num_rows: int, *_: object) -> Tiling:
        found = self.few if num_rows <= 16 else self.many
        assert found is not None
        return found


def ways(head_dim: int) -> list[Way]:
    """The one in use comes first."""
    own = choose_cut(head_dim)
    others = [
        *(Way(f"share {share}", own._replace(share=share)) for share in (128, 256, 512)),
        *(Way(f"{parts} at once", own._replace(at_once=parts)) for parts in (4, 16)),
        *(Way(f"{warps} warps", own._replace(num_warps=warps)) for warps in (2, 4)),
        Way("tiles 64x64", own, Tiling(16, 64, 4, 4), Tiling(64, 64, 4, 3)),
    ]
    if head_dim > 64:
        others.append(Way("tiles 128x64", own, Tiling(16, 64, 4, 4), Tiling(128, 64, 8, 4)))
    return [Way("in use"), *(way for way in others if way.cut != own or way.many is not None)]


def random_tree(num_nodes: int) -> list[list[int]]:
    """The path of each node."""
    generator = torch.Generator().manual_seed(1)
    paths = [[0]]
    for node in range(1, num_nodes):
        parent = int(torch.randint(max(0, node - 20), node, (), generator=generator))
        paths.append([*paths[parent], node])
    return paths


class Attention:
    """Attention of a tree, and of a lone query, behind so many tokens."""

    def __init__(self, heads: Heads, context: int, num_nodes: int) -> None:
        self.heads, self.context, self.num_nodes = heads, context, num_nodes
        K, D, N = heads.num_kv_heads, heads.head_dim, num_nodes
        pages = 2 * -(-(context + N) // _PAGE)  # as in use, where texts may become longer
        size = pages * _PAGE
        copies = min(_MOST_COPIES, max(12, _CACHE // (4 * K * context * D))) if ON_GPU else 1
        generator = torch.Generator(DEVICE).manual_seed(0)
        draw = partial(torch.randn, device=DEVICE, generator=generator)
        self.caches = [tuple(draw(2, K, size, D).to(DTYPE).unbind(0)) for _ in range(copies)]
        self.q = draw(1, N, heads.num_heads, D).to(DTYPE)
        self.tables = torch.arange(pages, device=DEVICE, dtype=torch.int32)[None]
        self.tree = random_tree(N)
        depth = max(map(len, self.tree))
        self.nodes = torch.tensor([path + [0] * (depth - len(path)) for path in self.tree], device=DEVICE)
        self.levels = torch.tensor([len(path) - 1 for path in self.tree], device=DEVICE)
        self.sees = torch.zeros(N, N, dtype=torch.bool)
        for node, path in enumerate(self.tree):
            self.sees[node, path] = True
        self.sees = self.sees.to(DEVICE)
        self._lengths: dict[int, Tensor] = {}
        self._paths: dict[tuple[int, int], Paths] = {}

    def fast(self, queries: int, caches: int | None = None) -> None:
        length, sees = self._length(self.context), self.sees if queries > 1 else None
        for k, v in self.caches[:caches]:
            attend(self.q[:, :queries], k, v, length, self.tables, _PAGE, sees)

    def exact(self, queries: int, caches: int | None = None) -> None:
        for k, v in self.caches[:caches]:
            self._exactly(k, v, self.context, queries)

    def _length(self, length: int) -> Tensor:
        if length not in self._lengths:
            self._lengths[length] = torch.tensor([length], device=DEVICE)
        return self._lengths[length]

    def _exactly(self, k: Tensor, v: Tensor, length: int, queries: int) -> tuple[Tensor, Tensor]:
        return attend_exactly(
            self.q[:, :queries], k, v, self._length(length), self.tables, _PAGE, self._path(length, queries)
        )

    def _path(self, length: int, queries: int) -> Paths:
        if (length, queries) not in self._paths:
            paths = Paths((self.levels + length)[None], self.nodes[None])
            if queries == 1:
                paths = chain_paths(self._length(length)[None])
            self._paths[length, queries] = paths
        return self._paths[length, queries]

    def bits_hold(self) -> bool:
        """Whether some nodes get the bits of lone queries, at two lengths."""
        k, v = self.caches[0]
        for length in (self.context, self.context - 5):
            out, lse = self._exactly(k, v, length, self.num_nodes)
            for node in {1, self.num_nodes // 2, self.num_nodes - 1}:
                path = [length + step for step in self.tree[node]]
                own_k, own_v = k.clone(), v.clone()
                end = length + len(path)
                own_k[:, length:end], own_v[:, length:end] = k[:, path], v[:, path]
                last = torch.tensor([end - 1], device=DEVICE)
                query, paths = self.q[:, node : node + 1].contiguous(), chain_paths(last[None])
                alone = attend_exactly(query, own_k, own_v, last, self.tables, _PAGE, paths)
                same = torch.equal(alone[0][0, 0], out[0, node]), torch.equal(alone[1][0, 0], lse[0, node])
                if not all(same):
                    return False
        return True


class Skipped:
    """Stands for a kernel that is not launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: None


def attention_table(heads: Heads, num_nodes: int) -> list[str]:
    """A line for each way: times of one query and of a tree at each context."""
    problems = [Attention(heads, context, num_nodes) for context in heads.contexts]
    sizes = (1, num_nodes)
    if ON_GPU:
        compile_for(_first_runs(problems, sizes))
    rows: dict[str, list[str]] = {"fast": [], "fast: first launch": []}
    for problem in problems:
        for queries in sizes:
            rows["fast"].append(_told(partial(problem.fast, queries), problem))
            with patch.multiple(attention, _merge_kernel=Skipped()):
                rows["fast: first launch"].append(_told(partial(problem.fast, queries), problem))
    for way in ways(heads.head_dim):
        with way.used():
            try:
                cells = [_cell(problem, queries) for problem in problems for queries in sizes]
            except Exception as error:  # registers or shared memory are not enough
                print(f"{heads.name}, {way.name}: {str(error)[:100]}", file=sys.stderr)
                continue
            rows[way.name] = cells
    with patch.multiple(exact, _recent_kernel=Skipped()):
        rows["in use: first launch"] = [
            _told(partial(problem.exact, queries), problem) for problem in problems for queries in sizes
        ]
    head = [f"{problem.context}, {queries}" for problem in problems for queries in sizes]
    return _table(f"attention {heads.name}: context, queries", head, rows)


def _first_runs(problems: list[Attention], sizes: tuple[int, ...]) -> Iterator[Work]:
    def run(way: Way, problem: Attention, queries: int) -> None:
        with way.used():
            problem.exact(queries, 1)

    for problem in problems:
        for queries in sizes:
            yield partial(problem.fast, queries, 1)
            for way in ways(problem.heads.head_dim):
                yield partial(run, way, problem, queries)


def _told(work: Work, problem: Attention, mark: str = "") -> str:
    return f"{microseconds(work) / len(problem.caches):.1f}{mark}"


def _cell(problem: Attention, queries: int) -> str:
    mark = "" if queries == 1 or problem.bits_hold() else "!"
    return _told(partial(problem.exact, queries), problem, mark)


# ---- products


def layers_table(shape: str, num_nodes: int, num_layers: int) -> list[str]:
    """All products of a layer in turn, as in a round."""
    target = random_target(replace(SHAPES[shape], num_layers=num_layers), DEVICE, DTYPE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    draw = partial(torch.randn, device=DEVICE, generator=generator)
    width = target.config.num_heads * target.config.head_dim
    rows: dict[str, list[str]] = {}
    for is_exact in (False, True):
        ops, cells = FusedOps(is_exact), []
        for num_rows in (1, num_nodes):
            x, out = draw(1, num_rows, target.config.hidden_size), draw(1, num_rows, width)
            x, out = x.to(DTYPE), out.to(DTYPE)

            def work(x: Tensor = x, out: Tensor = out, ops: FusedOps = ops) -> None:
                stream = Residual(x)
                blocks = [block for block in target.blocks if isinstance(block, Block)]
                for block, following in zip(blocks, [*blocks[1:], None], strict=True):
                    _, stream = block.enter(stream, ops)
                    stream = block.leave(stream, out, ops, following.reader if following else None)

            with torch.inference_mode():
                cells.append(f"{microseconds(work) / num_layers:.1f}")
        x = draw(1, num_nodes, target.config.hidden_size).to(DTYPE)
        head = partial(scores, target.head, x, is_exact)
        rows["exact" if is_exact else "fast"] = [*cells, f"{microseconds(head):.1f}"]
    return _table(f"{shape}, products of a layer", ["1 row", f"{num_nodes} rows", f"head, {num_nodes}"], rows)


def _table(title: str, head: list[str], rows: dict[str, list[str]]) -> list[str]:
    lines = [f"{title:24.24} " + " ".join(f"{each:>10}" for each in head)]
    for name, cells in rows.items():
        lines.append(f"{name:24} " + " ".join(f"{cell:>10}" for cell in cells))
    return [*lines, ""]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print all tables at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small shape, which needs no GPU")
    arguments = parser.parse_args(argv)
    shapes, num_nodes = (("tiny", 2),) if arguments.tiny else (("smollm2-135m", 30), ("llama3-8b", 4)), 64
    all_heads = [
        Heads("9/3 of 64", 9, 3, 64, (300, 512, 4096)),
        Heads("32/8 of 128", 32, 8, 128, (4096, 32768)),
    ]
    if arguments.tiny:
        all_heads, num_nodes = [Heads("2/1 of 16", 2, 1, 16, (300,))], 8
    lines: list[str] = []
    started = time.perf_counter()
    jobs: list[tuple[str, Callable[[], list[str]]]] = [
        *((heads.name, partial(attention_table, heads, num_nodes)) for heads in all_heads),
        *((shape, partial(layers_table, shape, num_nodes, layers)) for shape, layers in shapes),
    ]
    for name, job in jobs:
        try:
            with torch.inference_mode():
                lines += job()
        except Exception as error:  # the other tables are worth having
            lines += [f"{name}: {type(error).__name__}: {str(error)[:300]}", ""]
        print(f"{name}: done after {time.perf_counter() - started:.0f} s", flush=True)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
