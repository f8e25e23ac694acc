"""Which tiles are fastest for products with weights of 8 bits: `python -m benchmarks.eight_bit_tiles`.

Each product of a Llama-3-8B layer, and its head, with 1, 16 and 64 rows. 2 rows of fp8 are multiplied by
tensor cores, which would be another way for one row. Several rows of int8 are multiplied as planes, and the
time has the launch that makes them in it. A chain of products with different matrices, together larger than
the GPU's cache, runs as a CUDA graph. Every result is compared with fp32. The tile in use is marked with a
star. With --seconds, what is left at the end of that time is not measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from longspec.kernels import eight_bit, linear, planes
from longspec.kernels.eight_bit import RowTile
from longspec.kernels.launch import compile_for
from longspec.kernels.linear import Tile, few_rows
from longspec.kernels.norm import Residual
from longspec.kernels.planes import PlaneTile
from longspec.kernels.products import few_tile_rows
from longspec.models.eight_bit import KINDS

_CACHE = 2**28  # bytes of different weights in a chain, several times those of a cache
_REPLAYS = 12
_MOST_WRONG = 1e-2  # ||result - fp32|| / ||fp32||


@dataclass(frozen=True)
class Product:
    """A product of a layer."""

    name: str
    num_in: int
    num_out: int
    gated: bool = False


PRODUCTS = {
    "llama3-8b": (
        Product("qkv", 4096, 6144),
        Product("output", 4096, 4096),
        Product("gate, up", 4096, 28672, True),
        Product("down", 14336, 4096),
        Product("head", 4096, 128256),
    ),
    "smollm2-135m": (
        Product("qkv", 576, 960),
        Product("output", 576, 576),
        Product("gate, up", 576, 3072, True),
        Product("down", 1536, 576),
        Product("head", 576, 49152),
    ),
    "tiny": (Product("qkv", 64, 96), Product("gate, up", 64, 256, True), Product("down", 4160, 64)),
}


@dataclass(frozen=True)
class Candidate:
    """A tile and the rows that it multiplies."""

    tile: RowTile | Tile | PlaneTile | None
    """None is the one in use."""
    dtype: torch.dtype = torch.bfloat16
    """Of the rows."""

    def __str__(self) -> str:
        if self.tile is None:
            return "*"
        text = f"{self.tile.num_cols}x{self.tile.depth} s{self.tile.num_stages} w{self.tile.num_warps}"
        if not isinstance(self.tile, RowTile) and self.tile.num_shares > 1:
            text += f" /{self.tile.num_shares}"
        if isinstance(self.tile, Tile) and self.tile.boxes:
            text += " boxes"
        if isinstance(self.tile, PlaneTile):
            text += f" l{self.tile.num_lines}"
        return text + (" fp16 rows" if self.dtype == torch.float16 else "")


def candidates(product: Product, kind: torch.dtype, num_rows: int) -> list[Candidate]:
    """What to try for a product."""
    if num_rows == 1:
        tiles = LONG_ROW_TILES if product.num_in > 4096 else ROW_TILES
        return [Candidate(None), *(Candidate(RowTile(*tile)) for tile in tiles)]
    if kind == torch.int8:
        return [Candidate(None), *map(Candidate, plane_tiles(product, num_rows))]
    if num_rows == 2:
        wide = product.gated or product.name == "head"
        return [Candidate(Tile(*tile)) for tile in PAIR_TILES] if wide else []
    rows = 16 if num_rows <= 16 else 64
    sizes = (GATED_TILES if product.gated else WIDE_TILES if product.name == "head" else NARROW_TILES)[rows]
    found = [
        Candidate(Tile(rows, cols, depth, stages, warps, 1, boxes, shares, _registers(cols, warps, product)))
        for cols, depth, stages, warps, shares, boxes in sizes
    ]
    first = found[0].tile
    if rows == 64:
        found.append(Candidate(first, dtype=torch.float16))
    return [Candidate(None), *found]


def plane_tiles(product: Product, num_rows: int) -> list[PlaneTile]:
    """The tiles to try for a product of planes. All fetch 8 cache lines early, and the first two are also
    tried with 16 and 32."""
    rows = few_tile_rows(num_rows)
    narrow = NARROW_PLANES + (SMALL_PLANES if product.num_in * product.num_out <= 1 << 22 else ())
    sizes = GATED_PLANES if product.gated else WIDE_PLANES if product.name == "head" else narrow
    found = [PlaneTile(rows, *size) for size in sizes]
    return found + [replace(tile, num_lines=lines) for lines in (16, 32) for tile in found[:2]]


def _registers(cols: int, warps: int, product: Product) -> int | None:
    """So many that two programs of 8 warps or three of 4 warps fit on a multiprocessor."""
    if product.gated or cols > 128:
        return None
    return {8: 128, 4: 160, 2: None}[warps]


# Of one row: columns, depth, stages, warps.
ROW_TILES = (
    (16, 4096, 1, 8), (16, 4096, 1, 4), (8, 4096, 1, 4), (8, 4096, 1, 8), (4, 4096, 1, 4), (8, 1024, 4, 4),
)  # fmt: skip
LONG_ROW_TILES = (
    (8, 1024, 4, 4), (8, 1024, 6, 4), (16, 1024, 4, 8), (8, 2048, 3, 8), (4, 2048, 4, 4), (16, 512, 5, 4),
)  # fmt: skip
# Of planes: columns, depth, stages, warps, programs that share the depth.
NARROW_PLANES = (
    (64, 128, 6, 4, 1), (64, 128, 6, 4, 2), (64, 128, 4, 4, 2), (64, 128, 3, 4, 4), (64, 256, 3, 4, 1),
    (64, 256, 3, 4, 2), (64, 256, 4, 4, 2), (128, 128, 4, 8, 2), (128, 128, 4, 8, 4), (128, 256, 3, 8, 4),
)  # fmt: skip
SMALL_PLANES = ((16, 128, 4, 4, 1), (32, 128, 4, 4, 1), (16, 256, 3, 4, 1))
WIDE_PLANES = (
    (128, 128, 3, 4), (128, 128, 4, 8), (128, 256, 2, 4), (128, 128, 6, 4), (64, 128, 6, 4), (64, 256, 3, 4),
    (256, 128, 3, 8),
)  # fmt: skip
GATED_PLANES = (
    (64, 128, 3, 4), (128, 128, 4, 8), (64, 128, 4, 4), (64, 256, 2, 4), (64, 64, 6, 4), (128, 64, 6, 8),
    (64, 128, 4, 8),
)  # fmt: skip
# Of two rows: the tile's rows, columns, depth, stages, warps.
PAIR_TILES = ((8, 64, 256, 4, 4), (8, 64, 512, 3, 4), (8, 128, 256, 3, 8))
# Of 16 and 64 rows: columns, depth, stages, warps, programs that share the depth, whether to copy with boxes.
NARROW_TILES = {
    16: (
        (64, 256, 4, 4, 4, False), (64, 128, 4, 4, 4, False), (64, 128, 4, 4, 8, False),
        (128, 128, 4, 8, 4, False), (64, 256, 4, 2, 4, False), (64, 256, 3, 2, 8, False),
        (32, 256, 4, 2, 2, False), (32, 256, 4, 2, 4, False),
    ),
    64: (
        (128, 128, 3, 8, 4, False), (128, 128, 3, 8, 8, False), (128, 128, 4, 8, 4, True),
        (128, 64, 5, 8, 4, False), (64, 128, 4, 4, 2, False), (64, 128, 3, 4, 4, False),
        (64, 128, 4, 4, 2, True), (64, 64, 6, 4, 4, False), (64, 128, 4, 4, 1, False),
    ),
}  # fmt: skip
WIDE_TILES = {
    16: (
        (64, 256, 4, 4, 1, False), (128, 128, 4, 8, 1, False), (64, 128, 4, 4, 1, False),
        (64, 256, 4, 2, 1, False), (32, 256, 4, 2, 1, False),
    ),
    64: (
        (128, 128, 3, 8, 1, False), (64, 128, 4, 4, 1, False), (256, 128, 3, 8, 1, False),
        (128, 128, 4, 8, 1, True), (128, 64, 5, 8, 1, False),
    ),
}  # fmt: skip
GATED_TILES = {
    16: (
        (64, 128, 4, 4, 1, False), (64, 256, 3, 4, 1, False), (64, 128, 4, 2, 1, False),
        (32, 256, 3, 2, 1, False),
    ),
    64: (
        (64, 128, 3, 4, 1, False), (64, 128, 4, 4, 1, False), (64, 64, 5, 4, 1, False),
        (128, 64, 4, 8, 1, False), (128, 128, 2, 8, 1, False),
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print the fastest tiles of each product."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama3-8b", choices=PRODUCTS, help="(%(default)s)")
    parser.add_argument("--kinds", default="int8,fp8", help="of weights (%(default)s)")
    parser.add_argument("--rows", default="64,1,2,16", help="in the order of their measurement (%(default)s)")
    parser.add_argument("--seconds", type=float, default=600.0, help="to stop after (%(default)s)")
    arguments = parser.parse_args(argv)
    started, device = time.perf_counter(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = []
    for num_rows in map(int, arguments.rows.split(",")):
        if time.perf_counter() - started > arguments.seconds:
            lines.append(f"{num_rows} rows: not measured")
            continue
        chains = [
            Chain(product, KINDS[kind], num_rows, device)
            for kind in arguments.kinds.split(",")
            for product in PRODUCTS[arguments.shape]
        ]
        if device.type == "cuda":
            try:
                compile_for(partial(chain.run_with, one) for chain in chains for one in chain.candidates)
            except Exception as error:  # what cannot be compiled is told below
                print(f"compiling: {type(error).__name__} {str(error)[:200]}", file=sys.stderr)
        print(f"{num_rows} rows: compiled after {time.perf_counter() - started:.1f} s", file=sys.stderr)
        for chain in filter(lambda chain: chain.candidates, chains):
            late = time.perf_counter() - started > arguments.seconds
            lines.append(f"{chain.name}: not measured" if late else _line(chain))
            print(lines[-1], file=sys.stderr, flush=True)
    print("\nproduct, rows, weights (floor at 4.2 TB/s): microseconds of each tile, the fastest first")
    print("columns x depth, s stages, w warps, / programs that share the depth, l lines fetched early\n")
    print("\n".join(lines))
    return 0


def _line(chain: Chain) -> str:
    found = []
    for one in chain.candidates:
        try:
            error = chain.error(one)
            seconds = chain.seconds(one)
            wrong = "" if error < _MOST_WRONG else f" WRONG {error:.1e}"
            found.append((seconds, f"{1e6 * seconds:.1f} [{one}{wrong}]"))
        except Exception as error:  # registers or shared memory are not enough for this tile
            print(f"{chain.name} {one}: {type(error).__name__} {str(error)[:200]}", file=sys.stderr)
    return f"{chain.name}: " + ", ".join(text for _, text in sorted(found))


@contextmanager
def using(candidate: Candidate) -> Iterator[None]:
    """All products have this tile."""
    tile = candidate.tile
    if tile is None:
        yield
        return
    if isinstance(tile, RowTile):
        module, name = eight_bit, "row_tile"
    else:
        module, name = (
            (planes, "tile_of_planes") if isinstance(tile, PlaneTile) else (linear, "tile_of_bytes")
        )
    with patch.object(module, name, lambda *sizes: tile):
        yield


class Chain:
    """A product again and again, each time with other weights."""

    def __init__(self, product: Product, kind: torch.dtype, num_rows: int, device: torch.device) -> None:
        self._product, self._device = product, device
        # Of several rows of fp8 a norm has a launch of its own; without it, three products share kernels.
        self._normed = product.gated or (product.name == "qkv" and (num_rows == 1 or kind == torch.int8))
        num_bytes = product.num_in * product.num_out
        told = str(kind).removeprefix("torch.").removesuffix("_e4m3fn")
        self.name = f"{product.name}, {num_rows}, {told} ({num_bytes / 4.2e6:.1f})"
        self.candidates = candidates(product, kind, num_rows)
        count = max(2, _CACHE // num_bytes) if device.type == "cuda" else 1
        x = torch.randn(1, num_rows, product.num_in, device=device)
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        self._x = {dtype: x.to(self._dtype).to(dtype) for dtype in (self._dtype, torch.float16)}
        self._norm = {dtype: torch.ones(product.num_in, device=device, dtype=dtype) for dtype in self._x}
        shape = (product.num_out, product.num_in)
        # Only two of the matrices are random: the others are copies, which takes less time.
        drawn = [_draw(shape, kind, device) for _ in range(2)]
        copies = [drawn[i % 2].view(torch.uint8).clone().view(kind) for i in range(2, count)]
        self._weights = (drawn + copies)[:count]
        self._scales = 1e-4 * torch.rand(product.num_out, 1, device=device) + 1e-4
        width = product.num_out // (2 if product.gated else 1)
        stream = torch.randn(1, num_rows, width, device=device)
        self._stream = {dtype: stream.to(dtype) for dtype in self._x}

    def error(self, candidate: Candidate) -> float:
        """||result - fp32|| / ||fp32|| of one product."""
        with using(candidate):
            result = self._multiply(self._weights[1 % len(self._weights)], candidate).float()
        true = self._true()
        return float((result - true).norm() / true.norm())

    def seconds(self, candidate: Candidate) -> float:
        """Of one product."""
        with using(candidate):
            if self._device.type != "cuda":
                return _timed(partial(self._run, candidate)) / len(self._weights)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run(candidate)
        return statistics.median(_on_gpu(graph.replay) for _ in range(_REPLAYS)) / len(self._weights)

    def run_with(self, candidate: Candidate) -> None:
        """One product with this tile."""
        with using(candidate):
            self._multiply(self._weights[0], candidate)

    def _true(self) -> Tensor:
        if not hasattr(self, "_known"):
            weight = self._weights[1 % len(self._weights)]
            x, parts = self._x[self._dtype].float(), []
            if self._normed:
                x = (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)).to(self._dtype).float()
            for rows, scales in zip(
                weight.view(torch.uint8).split(8192), self._scales.split(8192), strict=True
            ):
                parts.append(x @ (rows.view(weight.dtype).float() * scales).T)
            result = torch.cat(parts, -1)
            if self._product.gated:
                gate, up = result.chunk(2, -1)
                result = torch.nn.functional.silu(gate) * up
            added = not self._normed and self._product.name != "head"
            self._known = result + self._stream[self._dtype].float() if added else result
        return self._known

    def _run(self, candidate: Candidate) -> None:
        for weight in self._weights:
            self._multiply(weight, candidate)

    def _multiply(self, weight: Tensor, candidate: Candidate) -> Tensor:
        product, dtype = self._product, candidate.dtype if self._device.type == "cuda" else self._dtype
        if self._normed:
            around: dict[str, Any] = {"norm": (self._norm[dtype], 1e-5), "gated": product.gated}
        elif product.name == "head":
            around = {"dtype": torch.float32}
        else:
            around = {"residual": self._stream[dtype]}
        result: Tensor = few_rows(Residual(self._x[dtype]), weight, scales=self._scales, **around)[0].x
        return result


def _draw(shape: tuple[int, int], kind: torch.dtype, device: torch.device) -> Tensor:
    numbers = torch.randint(-127, 128, shape, device=device, dtype=torch.int8)
    return numbers if kind == torch.int8 else (numbers.to(torch.float16) / 16).to(kind)


def _on_gpu(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
