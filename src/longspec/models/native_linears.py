"""The forms of a linear on a CPU whose products our C code (`native/product.h`) computes.

A row's product has the same bits alone and among others.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.models.layers import CpuLinear, Linear, LinearForm, PackedLinear, RMSNorm, is_fp32_on_cpu
from longspec.native.build import Matrix, code, library

TINY = torch.finfo(torch.float32).tiny
# The numbers of inputs.h and weights.h: what a product does with its input first, and what weights are in.
_PLAIN, _NORM, _GATED = range(3)
_KEPT_IN = (torch.float32, torch.bfloat16, torch.float16)
_GRID, _LEVELS, _FINE = range(len(_KEPT_IN), len(_KEPT_IN) + 6, 2)
# How many neighbours share a grid: the first that fits. Longer runs need fewer bytes.
_RUNS = (32, 16)


class _Arena:
    """Memory in huge pages, in which weights lie end to end; it is read a fifth faster than small ones."""

    # Matrices share a block, because one alone is often smaller than a huge page.
    _BLOCK = 2**26

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.int8)

    def keep(self, values: Tensor) -> Tensor:
        """A copy of these values. A block is freed when nobody holds a part of it."""
        num_bytes = values.numel() * values.element_size()
        with self._lock:
            if num_bytes > self._rest.numel():
                self._rest = self._fresh(max(num_bytes, self._BLOCK))
            # The next one starts at a line of the processor's cache.
            size = min(-(-num_bytes // 64) * 64, self._rest.numel())
            own, self._rest = self._rest[:size], self._rest[size:]
        return own[:num_bytes].view(values.dtype).view(values.shape).copy_(values)

    def _fresh(self, num_bytes: int) -> Tensor:
        block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # where there are no huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(block, dtype=torch.int8)


_ARENA = _Arena()


class NativeLinear(CpuLinear):
    """A frozen `Linear` on the CPU whose product our C code computes, with what is around it."""

    weight: Tensor
    """As the C code reads it."""

    def __init__(
        self, linear: Linear, weight: Tensor, kept_in: int, grids: Tensor | None = None, run: int = 0
    ) -> None:
        """`weight` and `grids` are laid out for `linear`; `run` neighbours share a grid. `kept_in` is the C
        code's number for what the weights are kept in."""
        super().__init__()
        self.num_out, self.num_in = linear.weight.shape
        self.register_buffer("weight", _ARENA.keep(weight))
        kept = None if grids is None else _ARENA.keep(grids)
        self.register_buffer("grids", kept)
        self.bias = None
        if linear.bias is not None:
            self.bias = F.pad(linear.bias.detach(), (0, -self.num_out % code().lanes()))
        grids_at, bias_at = (None if one is None else one.data_ptr() for one in (kept, self.bias))
        sizes = (self.num_in, self.num_out, kept_in, run, kept is not None and kept.dtype == torch.float16)
        self.matrix = Matrix(self.weight.data_ptr(), grids_at, bias_at, *sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias."""
        return self._multiply(_PLAIN, x)

    def normed(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """The product of the normed x."""
        return self._multiply(_NORM, x, norm)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """Add the product of x to `total`, in place."""
        return self._multiply(_PLAIN, x, total=total)

    def add_gated(self, total: Tensor, gate_up: Tensor) -> Tensor:
        """Multiply silu(gate) * up by the weights, and add the result to `total`, in place."""
        return self._multiply(_GATED, gate_up, total=total)

    def weight_rows(self, ids: Tensor | None) -> Tensor:
        """Rows of the weight as they are used, in fp32; all of them for None."""
        return self._rows(torch.arange(self.num_out) if ids is None else ids)

    def _rows(self, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def _multiply(
        self, form: int, x: Tensor, norm: RMSNorm | None = None, total: Tensor | None = None
    ) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.num_out) if total is None else total.contiguous()
        weight, eps = (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        adds, threads = total is not None, torch.get_num_threads()
        rows = out.numel() // self.num_out
        code().product(self.matrix, form, x.data_ptr(), weight, eps, rows, adds, out.data_ptr(), threads)
        return out


class NativeFloatLinear(NativeLinear):
    """The weights are fp32, bf16 or fp16; rows and sums are fp32. With fp32 weights, up to 8 rows take as
    long as one, because reading the weights takes longer than the arithmetic."""

    def __init__(self, linear: Linear, weight: Tensor) -> None:
        """`weight` is that of `linear`, in the dtype in which it is kept."""
        # The C code reads blocks of `lanes` outputs: [outputs / lanes, inputs, lanes].
        lanes = code().lanes()
        blocks = F.pad(weight, (0, 0, 0, -len(weight) % lanes)).unflatten(0, (-1, lanes))
        super().__init__(linear, blocks.transpose(1, 2), _KEPT_IN.index(weight.dtype))

    def _rows(self, ids: Tensor) -> Tensor:
        lanes = self.weight.shape[2]
        return self.weight[ids // lanes, :, ids % lanes].float()


class NativeGridLinear(NativeLinear):
    """Every `run` neighbours of a row share a step and a base. A weight is stored as a level of 8 bits, or of
    4 if that is enough for the matrix, and equals base + step * level exactly. So products have the same bits
    as with fp32 weights.

    Weights are on such grids if they were expanded from a checkpoint with at most 8 bits per weight, such as
    a GGUF.
    """

    grids: Tensor
    _KEPT_IN = _GRID
    # How many inputs of an output lie side by side.
    _BESIDE = 1

    def __init__(self, linear: Linear, levels: Tensor, grids: Tensor) -> None:
        """`levels`, uint8 [out, runs, run], the last run padded; `grids` [out, runs, 2]: steps and bases."""
        lanes, num_out, run = code().lanes(), len(levels), levels.shape[2]
        self.shares_bytes = int(levels.max()) < 16
        padding = -num_out % (2 * lanes if self.shares_bytes else lanes)
        blocks = F.pad(levels.flatten(1), (0, 0, 0, padding)).unflatten(0, (-1, lanes))
        blocks = blocks.unflatten(2, (-1, self._BESIDE)).transpose(1, 2)
        if self.shares_bytes:
            blocks = blocks[0::2] | blocks[1::2] << 4
        grids = F.pad(grids, (0, 0, 0, 0, 0, -num_out % lanes)).unflatten(0, (-1, lanes))
        kept_in = self._KEPT_IN + self.shares_bytes
        super().__init__(linear, blocks, kept_in, grids.permute(0, 2, 3, 1), run)

    def _rows(self, ids: Tensor) -> Tensor:
        lanes = code().lanes()
        block, lane = ids // lanes, ids % lanes
        steps, bases = self.grids[block, :, :, lane].double().unbind(-1)
        if self.shares_bytes:
            levels = self.weight[block // 2, :, lane] >> (4 * (block % 2)).to(torch.uint8)[:, None, None] & 15
        else:
            levels = self.weight[block, :, lane]
        levels = levels.flatten(1).unflatten(1, (steps.shape[1], -1))
        # In fp64 nothing but the last step rounds.
        return (levels * steps[:, :, None] + bases[:, :, None]).flatten(1)[:, : self.num_in].float()


class NativeLevelLinear(NativeGridLinear):
    """Levels are multiplied as integers, by rows that are rounded to 16 bits, with a scale for each run."""

    _KEPT_IN = _LEVELS
    _BESIDE = 4


class NativeFineLinear(NativeGridLinear):
    """The same with rows of 24 bits: as precise as fp32, and faster than `NativeGridLinear` where the
    processor multiplies bytes."""

    _KEPT_IN = _FINE
    _BESIDE = 4


def on_grids(linear: Linear) -> NativeGridLinear | None:
    """A linear whose weights are exactly on grids; None if they are not."""
    if not _has_native_forms(linear):
        return None
    form = NativeFineLinear if code().multiplies_bytes() else NativeGridLinear
    found = _find_grids(linear.weight.detach())
    return None if found is None else form(linear, *found)


def _find_grids(weight: Tensor, most_levels: int = 256) -> tuple[Tensor, Tensor] | None:
    """The levels and grids of a matrix whose weights lie exactly on grids; None if there are none."""
    for run in _RUNS:
        # One row first, because it is enough to refuse most matrices.
        if _fit(weight[:1], run) and (found := _fit(weight, run)) and int(found[0].max()) < most_levels:
            return found
    return None


def _fit(weight: Tensor, run: int) -> tuple[Tensor, Tensor] | None:
    """The same for runs of this length."""
    num_rows, num_in = weight.shape
    if num_in % run or not num_rows:
        return None
    weight, levels = weight.contiguous(), torch.empty(num_rows, num_in // run, run, dtype=torch.uint8)
    grids = torch.empty(num_rows, num_in // run, 2, dtype=torch.float32)
    places = (levels.data_ptr(), grids.data_ptr())
    found = code().fit_grids(weight.data_ptr(), num_rows, num_in, run, *places, torch.get_num_threads())
    # 2: fp16 has all of the numbers.
    return (levels, grids.half() if found == 2 else grids) if found else None


@dataclass(frozen=True)
class LevelForm:
    """Makes a linear whose products are of integers. Weights that lie on grids stay as they are; others are
    rounded to grids of `num_levels`, each for `run` neighbours."""

    num_levels: int
    run: int

    def __call__(self, linear: Linear) -> NativeLevelLinear | None:
        if not _has_native_forms(linear):
            return None
        weight = linear.weight.detach()
        return NativeLevelLinear(linear, *(_find_grids(weight, self.num_levels) or self._round(weight)))

    def _round(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        runs = F.pad(weight, (0, -weight.shape[1] % self.run)).unflatten(1, (-1, self.run))
        low, high = runs.aminmax(dim=2, keepdim=True)
        steps = ((high - low) / (self.num_levels - 1)).clamp_(min=TINY)
        levels = ((runs - low) / steps).round_().clamp_(max=self.num_levels - 1).to(torch.uint8)
        return levels, torch.cat((steps, low), 2)


EIGHT_BITS, FOUR_BITS = LevelForm(256, 64), LevelForm(16, 32)


@dataclass(frozen=True)
class FloatForm:
    """Makes a linear that keeps its weights in `dtype`."""

    dtype: torch.dtype
    rounds: bool = False
    """Whether weights are rounded to `dtype`. If not, only a linear whose weights are all numbers of `dtype`
    can have this form, so that nothing is lost."""

    def __call__(self, linear: Linear) -> NativeFloatLinear | None:
        if not _has_native_forms(linear):
            return None
        weight = linear.weight.detach()
        # One row first, because it is enough to refuse most matrices.
        for part in (weight[:1], weight):
            kept = part.to(self.dtype)
            if not self.rounds and bool((kept != part).any()):
                return None
        return NativeFloatLinear(linear, kept)


# The first form that a linear can have is used. Those of fewer bytes than fp32 come first; products are as
# precise in all of them.
_FP32_FORMS: tuple[LinearForm, ...] = (
    on_grids,
    FloatForm(torch.bfloat16),
    FloatForm(torch.float16),
    FloatForm(torch.float32),
    PackedLinear.of,
)


def packed(linear: Linear) -> nn.Module:
    """The fastest form of the same weights that there is for few rows; `linear` itself if there is none."""
    made = (form(linear) for form in _FP32_FORMS)
    return next((one for one in made if one is not None), linear)


def has_native_products() -> bool:
    """Whether this machine can compile them."""
    return library() is not None


def _has_native_forms(linear: Linear) -> bool:
    return is_fp32_on_cpu(linear) and has_native_products()
