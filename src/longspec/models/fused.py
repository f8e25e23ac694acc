"""`Ops` with our own kernels: between two products there is one launch, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longspec.kernels.embed import embed
from longspec.kernels.norm import Norm, Residual, norm_stream
from longspec.kernels.silu import silu_mul
from longspec.models.layers import FeedForward, Linear, Reader, RMSNorm, Table, look_up
from longspec.models.sharding import SummedLinear


@dataclass(frozen=True)
class FusedOps:
    """A product of few rows does norm, gate and residual in the same launch; a larger one has launches of
    their own for them."""

    exact: bool = False
    """Whether a row gets the same bits whatever the other rows are: every product is by our kernel then."""

    def embed(
        self, tokens: Tensor, table: Table, added: Tensor | None, following: Reader
    ) -> tuple[Residual, Residual]:
        if not isinstance(table, Tensor):
            x = look_up(table, tokens)
            return Residual(x), Residual(x if added is None else x + added)
        factor = None if self.exact else self.factor(following, tokens.numel())
        return embed(tokens, table, added, factor)

    def normed_linear(self, reader: Reader, stream: Residual) -> tuple[Tensor, Residual]:
        norm, linear = reader
        if self.exact or linear.covers(stream.x):
            out, stream = linear.few_rows(stream, norm=_settings(norm), exact=self.exact)
            return out.x, stream
        normed, stream = norm_stream(stream, _settings(norm))
        return linear(normed), stream

    def last(self, stream: Residual, num_tokens: int) -> Residual:
        assert stream.delta is None
        return Residual(stream.x[:, -num_tokens:].contiguous())

    def add_linear(self, linear: Linear, x: Tensor, stream: Residual, following: Reader | None) -> Residual:
        if isinstance(linear, SummedLinear):
            # The next norm adds it.
            assert stream.delta is None
            return Residual(stream.x, self._summed(linear, x))
        if not (self.exact or linear.covers(x)):
            return Residual(linear.add_to(stream.x, x))
        around = {"factor": self.factor(following, x.numel() // x.shape[-1]), "exact": self.exact}
        added: Residual = linear.few_rows(Residual(x), residual=stream.x, **around)[0]
        return added

    def _summed(self, linear: SummedLinear, x: Tensor) -> Tensor:
        part: Any = linear.part
        own = part.few_rows(Residual(x))[0].x if part.covers(x) else part(x)
        return linear.shard.sum(own)

    def feed_forward(
        self, ffn: FeedForward, norm: RMSNorm, stream: Residual, following: Reader | None
    ) -> Residual:
        if self.exact or ffn.gate_up.covers(stream.x):
            around = {"norm": _settings(norm), "gated": True, "exact": self.exact}
            out, stream = ffn.gate_up.few_rows(stream, **around)
            inner = out.x
        else:
            normed, stream = norm_stream(stream, _settings(norm))
            inner = silu_mul(ffn.gate_up(normed))
        return self.add_linear(ffn.down, inner, stream, following)

    def finish(self, stream: Residual, norm: RMSNorm | None) -> Tensor:
        if norm is not None:
            return norm_stream(stream, _settings(norm))[0]
        return stream.x if stream.delta is None else stream.x + stream.delta

    def factor(self, reader: Reader | None, num_rows: int) -> Tensor | None:
        """The norm's weight if the kernel that makes the stream should prepare for the norm, else None."""
        return reader[0].weight if reader is not None and reader[1].folds(num_rows, self.exact) else None


def _settings(norm: RMSNorm) -> Norm:
    return norm.weight, norm.eps
