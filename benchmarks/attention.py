"""Attention of one layer over a long cache, against the memory's speed and against torch's kernels.

`python benchmarks/attention.py` prints a table; it needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from longspec.attention.base import merge
from longspec.bench.environment import copy_bandwidth
from longspec.engine.graph import capture
from longspec.engine.memory import FUSED_PAGE

_CONTEXTS = (4096, 32768, 131072, 262144)
_NODES = (1, 16, 64)


@dataclass(frozen=True)
class Shape:
    """One layer's attention of one row, whose pages follow each other."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    num_nodes: int

    @property
    def num_bytes(self) -> int:
        """What must be read: the keys and values of the context, in 16 bits."""
        return 4 * self.num_kv_heads * self.context * self.head_dim


def time_of(work: Callable[[], object], num_replays: int = 30) -> float:
    """Milliseconds of `work` on the device: the median over replays of a CUDA graph of it."""
    (graph,) = capture([work], torch.device("cuda"))
    times = []
    for _ in range(num_replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def measure(shape: Shape) -> dict[str, float]:
    """Milliseconds of our kernels, of torch's flash over the prefix, and of that with tree and merge."""
    from longspec.kernels.attention import attend

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, device="cuda", generator=generator).to(torch.bfloat16)

    N, K, D, L = shape.num_nodes, shape.num_kv_heads, shape.head_dim, shape.context
    q = draw(1, N, shape.num_heads, D)
    # Small caches stay in the L2 cache, which a layer's never does in a model: read several in turn.
    copies = max(1, (1 << 28) // shape.num_bytes)
    pages = -(-(L + N) // FUSED_PAGE)
    caches = [(draw(K, pages * FUSED_PAGE, D), draw(K, pages * FUSED_PAGE, D)) for _ in range(copies)]
    lengths = torch.tensor([L], device="cuda")
    tables = torch.arange(pages, device="cuda", dtype=torch.int32)[None]
    tree = torch.ones(N, N, dtype=torch.bool, device="cuda").tril()
    folded = q.view(N, K, -1, D).transpose(0, 1).reshape(1, K, -1, D)
    bias = torch.zeros(N, N, device="cuda", dtype=q.dtype).masked_fill_(~tree, -torch.inf)
    bias = bias.repeat_interleave(shape.num_heads // K, 0)
    bias = torch.nn.functional.pad(bias, (0, -N % 16))[:, :N].expand(1, K, -1, -1)

    def flash(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(folded, k[None, :, :L], v[None, :, :L])[
            :2
        ]
        return out, lse

    def composition(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse = efficient(folded, k[None, :, L : L + N], v[None, :, L : L + N], bias, True)[:2]
        return merge(flash(k, v), (out, lse[..., : folded.shape[2]]))

    def average(one: Callable[[Tensor, Tensor], object]) -> float:
        return time_of(lambda: [one(k, v) for k, v in caches]) / copies

    return {
        "ours": average(lambda k, v: attend(q, k, v, lengths, tables, FUSED_PAGE, tree)),
        "flash": average(flash),
        "composition": average(composition),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(_CONTEXTS))
    parser.add_argument("--nodes", type=int, nargs="+", default=list(_NODES))
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this needs a GPU; none is here")
    bandwidth = copy_bandwidth(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, bf16, times in ms")
    print(f"{'context':>8} {'nodes':>5} {'ours':>8} {'floor':>8} {'ratio':>6} {'flash':>8} {'composed':>8}")
    for context in given.contexts:
        for nodes in given.nodes:
            shape = Shape(given.heads, given.kv_heads, given.head_dim, context, nodes)
            times, floor = measure(shape), shape.num_bytes / bandwidth * 1e3
            print(
                f"{context:>8} {nodes:>5} {times['ours']:>8.4f} {floor:>8.4f} {times['ours'] / floor:>6.2f} "
                f"{times['flash']:>8.4f} {times['composition']:>8.4f}"
            )


if __name__ == "__main__":
    main()
