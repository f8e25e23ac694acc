"""Which tiles are fastest for products with weights of 8 bits: `python -m benchmarks.eight_bit_tiles`.

Each product of a Llama-3-8B layer, and its head, with 1, 16 and 64 rows. A chain of products with different
matrices, together larger than the GPU's cache, runs as a CUDA graph. The tile in use is the first line.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspec.kernels import eight_bit, linear
from longspec.kernels.eight_bit import RowTile
from longspec.kernels.launch import compile_for
from longspec.kernels.linear import Tile, few_rows
from longspec.kernels.norm import Residual
from longspec.models.eight_bit import KINDS

_CACHE = 2**28  # bytes of different weights in a chain, several times those of a cache
_REPLAYS = 12


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
    "tiny": (Product("qkv", 64, 96), Product("gate, up", 64, 256, True), Product("down", 4160, 64)),
}
ROW_TILES = tuple(
    RowTile(cols, depth, stages, warps)
    for cols, depth, stages, warps in (
        (16, 4096, 1, 8), (8, 4096, 1, 4), (8, 4096, 1, 8), (4, 4096, 1, 4), (16, 4096, 1, 16),
        (8, 1024, 4, 4), (8, 1024, 6, 4), (16, 1024, 4, 8), (16, 1024, 4, 4),
        (4, 2048, 4, 4), (8, 2048, 3, 8),
    )
)  # fmt: skip
TILES = tuple(
    RowTile(cols, depth, stages, warps)
    for cols, depth, stages, warps in (
        (32, 256, 8, 4), (32, 256, 5, 4), (32, 256, 4, 8), (32, 512, 3, 4), (32, 128, 8, 4), (32, 128, 6, 8),
        (64, 128, 5, 4), (64, 128, 6, 8), (64, 256, 3, 4), (64, 256, 3, 8), (16, 512, 4, 4), (16, 256, 6, 4),
        (128, 128, 4, 8), (128, 128, 4, 4),
    )
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print the fastest tiles of each product."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama3-8b", choices=PRODUCTS, help="(%(default)s)")
    parser.add_argument("--kinds", default="int8,fp8", help="of weights (%(default)s)")
    parser.add_argument("--rows", default="1,16,64", help="(%(default)s)")
    parser.add_argument("--show", type=int, default=3, help="tiles of each product (%(default)s)")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("| weights | product | rows | tile: columns, depth, stages, warps | microseconds | TB/s |")
    print("|---" * 6 + "|")
    for kind in arguments.kinds.split(","):
        for product in PRODUCTS[arguments.shape]:
            for num_rows in map(int, arguments.rows.split(",")):
                _print_product(product, KINDS[kind], num_rows, device, arguments.show)
    return 0


def _print_product(
    product: Product, kind: torch.dtype, num_rows: int, device: torch.device, show: int
) -> None:
    chain, tiles = Chain(product, kind, num_rows, device), ROW_TILES if num_rows == 1 else TILES
    if device.type == "cuda":
        compile_for(partial(chain.run_with, tile) for tile in tiles)
    found = [("in use", chain.seconds())]
    for tile in tiles:
        with using(tile, num_rows):
            try:
                found.append((", ".join(map(str, tile)), chain.seconds()))
            except Exception as error:  # registers or shared memory are not enough for this tile
                print(f"{product.name}, {num_rows} rows, {tile}: {str(error)[:80]}", file=sys.stderr)
    for name, seconds in [found[0], *sorted(found[1:], key=lambda one: one[1])[:show]]:
        rate = product.num_in * product.num_out / seconds / 1e12
        told = f"{str(kind).removeprefix('torch.')} | {product.name} | {num_rows} | {name}"
        print(f"| {told} | {1e6 * seconds:.1f} | {rate:.2f} |", flush=True)


@contextmanager
def using(tile: RowTile, num_rows: int) -> Iterator[None]:
    """All products have this tile."""
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    own: Any = tile if num_rows == 1 else Tile(rows, *tile)
    module, name = (eight_bit, "row_tile") if num_rows == 1 else (linear, "tile_of_bytes")
    before = getattr(module, name)
    setattr(module, name, lambda *sizes: own)
    try:
        yield
    finally:
        setattr(module, name, before)


class Chain:
    """A product again and again, each time with other weights."""

    def __init__(self, product: Product, kind: torch.dtype, num_rows: int, device: torch.device) -> None:
        self._product, self._device, self._num_rows = product, device, num_rows
        num_bytes = product.num_in * product.num_out
        count = max(2, _CACHE // num_bytes) if device.type == "cuda" else 1
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._x = torch.randn(1, num_rows, product.num_in, device=device).to(dtype)
        self._norm = torch.ones(product.num_in, device=device, dtype=dtype), 1e-5
        shape = (product.num_out, product.num_in)
        self._weights = [
            torch.randint(-100, 101, shape, device=device, dtype=torch.int8).to(kind) for _ in range(count)
        ]
        self._scales = torch.full((product.num_out, 1), 1e-3, device=device)
        width = product.num_out // (2 if product.gated else 1)
        self._stream = torch.randn(1, num_rows, width, device=device).to(dtype)

    def seconds(self) -> float:
        """Of one product."""
        if self._device.type != "cuda":
            return _timed(self._run) / len(self._weights)
        self._run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        return statistics.median(_on_gpu(graph.replay) for _ in range(_REPLAYS)) / len(self._weights)

    def run_with(self, tile: RowTile) -> None:
        """One product with this tile."""
        with using(tile, self._num_rows):
            self._multiply(self._weights[0])

    def _run(self) -> None:
        for weight in self._weights:
            self._multiply(weight)

    def _multiply(self, weight: Tensor) -> None:
        product = self._product
        if product.gated or product.name == "qkv":
            few_rows(Residual(self._x), weight, norm=self._norm, gated=product.gated, scales=self._scales)
        elif product.name == "head":
            few_rows(Residual(self._x), weight, scales=self._scales, dtype=torch.float32)
        else:
            few_rows(Residual(self._x), weight, residual=self._stream, scales=self._scales)


def _on_gpu(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _timed(work: Callable[[], object]) -> float:
    from time import perf_counter

    started = perf_counter()
    work()
    return perf_counter() - started


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
