"""A rank's share of a model, where several processes hold one together.

Heads and the feed-forward's inner width are divided: matrices that lead to them are split by rows, and those
that lead back to the residual stream by columns, so that each rank's product is a part of a sum. The rows of
the vocabulary are divided too. So a rank's model is an ordinary one with fewer heads, and what differs is
here: the sums, the rows of tokens, the scores of the whole vocabulary, and the decisions of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.config import ModelConfig
from longspec.models.layers import Block

if TYPE_CHECKING:
    from longspec.models.draft import GlideDraft
    from longspec.models.target import Transformer

Cut = Callable[[tuple[int, ...]], tuple[slice, ...]]
"""The part of a tensor that a rank holds, by the tensor's shape."""
# The ends of the names of parameters that are divided; the others are whole on every rank.
_BY_ROWS = ("qkv.weight", "qkv.bias", "gate_up.weight", "cross_q.weight", "cross_q.bias", "head.weight")
_BY_COLUMNS = ("output.weight", "down.weight")


@dataclass(frozen=True)
class Shard:
    """Which part of a model this process holds. The processes are torch's default group."""

    rank: int
    size: int
    whole: ModelConfig
    """The shape of the model that all ranks hold together."""

    def cut(self, name: str) -> Cut:
        """The part of a tensor that goes into our parameter `name`."""
        return lambda shape: self._slices(name, shape)

    def _slices(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        if name == "embedding" or name.endswith(_BY_ROWS):
            return (self._part(shape[0]),)
        return (slice(None), self._part(shape[1])) if name.endswith(_BY_COLUMNS) else ()

    def each(self, size: int) -> int:
        """How many of `size` rows a rank has, with the rows of zeros of the last ranks."""
        return -(-size // self.size)

    def _part(self, size: int) -> slice:
        """Equal parts; the last ones are shorter where the size does not divide."""
        each = self.each(size)
        return slice(min(self.rank * each, size), min((self.rank + 1) * each, size))

    def finished(self, name: str, tensor: Tensor) -> Tensor:
        """A part as the model holds it."""
        if name in ("embedding", "head.weight"):
            return self._padded(tensor, self.whole.vocab_size)
        # A bias is added once: the sum is over all ranks.
        return torch.zeros_like(tensor) if self.rank and name.endswith("output.bias") else tensor

    def _padded(self, rows: Tensor, whole: int) -> Tensor:
        """With rows of zeros where this rank has fewer than others, because gathering wants equal parts."""
        return F.pad(rows, (0, 0, 0, self.each(whole) - len(rows)))

    def own_rows(self, rows: Tensor) -> Tensor:
        """This rank's part of rows [V', E] that every rank has."""
        return self._padded(rows[self._part(len(rows))], len(rows)).contiguous()

    def draft_part(self, name: str, tensor: Tensor, num_cross: int) -> Tensor:
        """The part of a draft's parameter. Those of cross-attention have the heads of several layers, one
        layer after the other."""
        dim, groups = int(name.endswith(_BY_COLUMNS)), num_cross if name.startswith("cross_") else 1
        if not name.endswith((*_BY_ROWS, *_BY_COLUMNS)):
            return tensor
        layers = tensor.unflatten(dim, (groups, -1))
        part = self._part(layers.shape[dim + 1])
        return layers.narrow(dim + 1, part.start, part.stop - part.start).flatten(dim, dim + 1).contiguous()

    def sum(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        dist.all_reduce(part)
        return part

    def join(self, part: Tensor, size: int) -> Tensor:
        """All ranks' scores side by side: [..., size] of [..., V / N] each."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part)
        return torch.cat(parts, -1)[..., :size].contiguous()

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph can hold the collectives."""
        return dist.get_backend() == "nccl"

    def agree(self, value: Tensor) -> Tensor:
        """Rank 0's value. All ranks compute it from the same numbers; this makes sure that no rounding can
        let texts differ between ranks."""
        value = value.contiguous()  # an expanded one would be written behind its end
        dist.broadcast(value, 0)
        return value

    def attach(self, model: Transformer) -> None:
        """Let a model that holds this part compute as the whole."""
        model.shard = self
        for block in model.blocks:
            assert isinstance(block, Block)
            _sum_products(self, block.attention, "output")
            _sum_products(self, block.ffn, "down")

    def attach_draft(self, draft: GlideDraft) -> None:
        """The same for a draft."""
        for name in ("self_output", "cross_output"):
            _sum_products(self, draft, name)
        _sum_products(self, draft.ffn, "down")


def _sum_products(shard: Shard, module: nn.Module, name: str) -> None:
    setattr(module, name, SummedLinear(module.get_submodule(name), shard))


class SummedLinear(nn.Module):
    """A linear that is divided by columns, in any form: its product is the sum of all ranks' products."""

    def __init__(self, part: nn.Module, shard: Shard) -> None:
        super().__init__()
        self.part, self.shard = part, shard

    def forward(self, x: Tensor) -> Tensor:
        return self.shard.sum(self.part(x))

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """The product of x [..., in] added to `total` [..., out]."""
        return total + self(x)


class SharedTable(nn.Module):
    """An embedding whose rows are divided."""

    def __init__(self, rows: Tensor, shard: Shard) -> None:
        super().__init__()
        self.rows, self.shard = rows, shard

    def forward(self, tokens: Tensor) -> Tensor:
        return shared_rows(lambda ids: F.embedding(ids, self.rows), len(self.rows), tokens, self.shard)


def shared_rows(own_rows: Callable[[Tensor], Tensor], num_own: int, ids: Tensor, shard: Shard) -> Tensor:
    """Rows of a divided matrix: each rank has `num_own` of them, and `own_rows` reads those. The result is a
    sum over the ranks; a rank that does not have a row adds zeros."""
    own = ids - shard.rank * num_own
    is_own = (own >= 0) & (own < num_own)
    found = own_rows(torch.where(is_own, own, 0)) * is_own[..., None]
    return shard.sum(found) if ids.numel() else found
