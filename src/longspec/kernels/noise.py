"""The noise of sampled tokens, bit for bit the same as in `longspec.decoding.choose`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.launch import await_turn, launched, overlap

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_BLOCK = 1024


@triton.jit
def _mix(x):
    """The finaliser of SplitMix64, on uint64."""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, position, token) -> tl.tensor:
    """Numbers in (0, 1), fp64, for token ids at (seed, position); all are int64 blocks and broadcast."""
    key = _mix(_mix(seed.to(tl.uint64) + _GOLDEN) ^ (position.to(tl.uint64) * _GOLDEN))
    bits = _mix(key + token.to(tl.uint64) * _GOLDEN)
    return ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def gumbel(seed, position, token) -> tl.tensor:
    """Gumbel noise in fp64 for token ids at (seed, position); all are int64 blocks and broadcast."""
    # u has 52 bits plus a half, so 1 - u is exact in fp64, and log is as good as log1p.
    return -tl.log(-tl.log(1.0 - uniform(seed, position, token)))


@launched
@triton.jit(do_not_specialize=["ahead"])
def _noise_kernel(
    seeds, positions, tokens, temperature, out, size, ahead, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    await_turn(OVERLAP)
    row, further = tl.program_id(1).to(tl.int64), tl.program_id(2)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.zeros([BLOCK], tl.float32)
    if tl.load(temperature + row) > 0:
        token = tl.load(tokens + i, mask=i < size, other=0)
        seed, position = tl.load(seeds + row + i * 0), tl.load(positions + row + i * 0)
        value = gumbel(seed, position + ahead + further, token).to(tl.float32)
    tl.store(out + (further * tl.num_programs(1) + row) * size + i, value, mask=i < size)


def gumbel_noise(
    seeds: Tensor, positions: Tensor, tokens: Tensor, temperature: Tensor, ahead: int = 0, count: int = 1
) -> Tensor:
    """Gumbel noise, fp32 [count, R, V], for token ids [V] at seeds [R] and at `count` positions, of which the
    first is `ahead` after positions [R]; all int64. Rows whose temperature, fp32 [R], is 0 get 0."""
    (R,), (V,) = seeds.shape, tokens.shape
    out = torch.empty(count, R, V, dtype=torch.float32, device=seeds.device)
    _noise_kernel[(triton.cdiv(V, _BLOCK), R, count)](
        seeds.contiguous(), positions.contiguous(), tokens.contiguous(), temperature.contiguous(), out, V,
        ahead, BLOCK=_BLOCK, **overlap(seeds.device),
    )  # fmt: skip
    return out
