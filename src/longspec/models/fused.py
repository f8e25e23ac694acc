"""The small work around products by our own kernels: between two products lies one launch, or none."""

from __future__ import annotations

from torch import Tensor

from longspec.kernels.embed import embed
from longspec.kernels.norm import Norm, Stream, norm_stream
from longspec.kernels.silu import silu_mul
from longspec.models.layers import FeedForward, Linear, Reader, RMSNorm


class FusedOps:
    """By our own kernels: products of few rows do the work around them in the same launch, others leave it to
    a launch of its own."""

    def embed(
        self, tokens: Tensor, table: Tensor, added: Tensor | None, following: Reader
    ) -> tuple[Stream, Stream]:
        return embed(tokens, table, added, factor_for(following, tokens.numel()))

    def normed_linear(self, reader: Reader, stream: Stream) -> tuple[Tensor, Stream]:
        norm, linear = reader
        if linear.covers(stream.x):
            out, stream = linear.few_rows(stream, norm=_settings(norm))
            return out.x, stream
        normed, stream = norm_stream(stream, _settings(norm))
        return linear(normed), stream

    def last(self, stream: Stream, num_tokens: int) -> Stream:
        assert stream.delta is None
        return Stream(stream.x[:, -num_tokens:].contiguous())

    def add_linear(self, linear: Linear, x: Tensor, stream: Stream, following: Reader | None) -> Stream:
        if not linear.covers(x):
            return Stream(linear.add_to(stream.x, x))
        factor = factor_for(following, x.numel() // x.shape[-1])
        added: Stream = linear.few_rows(Stream(x), residual=stream.x, factor=factor)[0]
        return added

    def feed_forward(
        self, ffn: FeedForward, norm: RMSNorm, stream: Stream, following: Reader | None
    ) -> Stream:
        if ffn.gate_up.covers(stream.x):
            out, stream = ffn.gate_up.few_rows(stream, norm=_settings(norm), gated=True)
            inner = out.x
        else:
            normed, stream = norm_stream(stream, _settings(norm))
            inner = silu_mul(ffn.gate_up(normed))
        return self.add_linear(ffn.down, inner, stream, following)

    def finish(self, stream: Stream, norm: RMSNorm | None) -> Tensor:
        if norm is not None:
            return norm_stream(stream, _settings(norm))[0]
        return stream.x if stream.delta is None else stream.x + stream.delta


def factor_for(reader: Reader | None, num_rows: int) -> Tensor | None:
    """The norm's weight, where those who make so many rows of the stream do what the norm needs."""
    return reader[0].weight if reader is not None and reader[1].folds(num_rows) else None


def _settings(norm: RMSNorm) -> Norm:
    return norm.weight, norm.eps
