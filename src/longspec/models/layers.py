"""The parts of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.config import ModelConfig
from longspec.models.rope import rotate

Stream = Any
"""The residual stream between two products: a tensor for `PlainOps`, a `Residual` for `FusedOps`."""


class ForwardPass(Protocol):
    """What all layers of a forward pass share: one class for plain decoding, fused decoding and training."""

    @property
    def ops(self) -> Ops: ...

    def attend(self, module: SelfAttention, qkv: Tensor) -> Tensor:
        """Attend with a layer's projection [B, T, (H + 2 K) D] of the new tokens. Returns [B, T, H D], or
        fewer tokens if only the last ones are needed."""
        ...

    def through(self, blocks: Sequence[Block], stream: Stream) -> Stream:
        """The stream behind all blocks."""
        ...


class BlockByBlock:
    """A `ForwardPass` that runs one block after the other inherits this."""

    def through(self: ForwardPass, blocks: Sequence[Block], stream: Stream) -> Stream:
        followers = (*(block.reader for block in blocks[1:]), None)
        for block, following in zip(blocks, followers, strict=True):
            stream = block(stream, self, following)
        return stream


class RMSNorm(nn.Module):
    """Scale to unit root mean square, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self._eps = torch.tensor(eps, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x; the mean square is taken in fp32."""
        if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_grad_enabled():
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        # A third of the time that torch's own takes for few rows.
        norms = torch.linalg.vector_norm(x, 2, -1, True)
        scales = torch.addcmul(self._eps, norms, norms, value=1 / x.shape[-1]).rsqrt_()
        return (x * self.weight).mul_(scales)


class Linear(nn.Linear):
    """A matrix, and a bias if the family has one; not initialised until weights are loaded or drawn.

    A linear owns its product. Calling it works for any number of rows. `few_rows` is for few rows on a GPU
    and computes what is around the product in the same launch.
    """

    bias: nn.Parameter | None  # type: ignore[assignment]  # torch declares that it is never None

    def __init__(self, num_in: int, num_out: int, bias: bool = False) -> None:
        super().__init__(num_in, num_out, bias)

    def reset_parameters(self) -> None:
        """Do nothing: torch would fill weights that are replaced right after."""

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """Add the product of x [..., in] to `total` [..., out], in place if possible, because that saves a
        pass over memory."""
        if self.bias is not None or not total.is_contiguous():
            return total + self(x)
        total.view(-1, total.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), self.weight.T)
        return total

    def weight_rows(self, ids: Tensor | None) -> Tensor:
        """Rows of the weight; all of them for None."""
        return self.weight if ids is None else self.weight[ids]

    def covers(self, x: Tensor) -> bool:
        """Whether to use `few_rows` for this product."""
        from longspec.kernels.linear import covers

        return covers(x, self.weight)

    def folds(self, num_rows: int, exact: bool) -> bool:
        """Whether the kernel that makes the stream should prepare for the norm of `few_rows`."""
        from longspec.kernels.linear import folds

        return folds(num_rows, self.weight, exact)

    def few_rows(self, x: Any, **around: Any) -> tuple[Any, Any]:
        """The product of few rows, with the options of `longspec.kernels.linear.few_rows`."""
        from longspec.kernels.linear import few_rows

        return few_rows(x, self.weight, self.bias, **around)


class CpuLinear(nn.Module):
    """The common part of a `Linear`'s forms for the CPU, whose product no GPU kernel computes."""

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """The product of x [..., in] added to `total` [..., out]."""
        return total + self(x)

    def covers(self, x: Tensor) -> bool:
        return False

    def folds(self, num_rows: int, exact: bool) -> bool:
        return False


class PackedLinear(CpuLinear):
    """A frozen fp32 `Linear` on the CPU, its weight in oneDNN's blocked layout.

    Decoding on a CPU takes as long as reading the weights. This layout is read about twice as fast as a plain
    matrix, for one row and for a tree of rows. The plain copy is dropped.
    """

    # oneDNN has a slower kernel for fewer rows: 1 row took 20 ms, 4 rows took 15.
    MIN_ROWS = 4

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.num_out = linear.weight.shape[0]
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 8)
        self.bias = None if linear.bias is None else linear.bias.detach()

    @classmethod
    def of(cls, linear: Linear) -> PackedLinear | None:
        """The packed form of `linear`; None if this build of torch cannot pack it."""
        mkldnn = torch.backends.mkldnn.is_available()
        can_pack = mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        return cls(linear) if can_pack and is_fp32_on_cpu(linear) else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows >= self.MIN_ROWS:
            return self._apply_packed(x)
        padded = F.pad(x.reshape(rows, -1), (0, 0, 0, self.MIN_ROWS - rows))
        return self._apply_packed(padded)[:rows].view(*x.shape[:-1], self.num_out)

    def weight_rows(self, ids: Tensor | None) -> Tensor:
        """Rows of the weight; all of them for None."""
        weight = self.weight.to_dense()
        return weight if ids is None else weight[ids]

    def _apply_packed(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def is_fp32_on_cpu(linear: Linear) -> bool:
    """Whether `linear` can have a form for the CPU."""
    return linear.weight.device.type == "cpu" and linear.weight.dtype == torch.float32


LinearForm = Callable[[Linear], nn.Module | None]
"""Makes the module that replaces a `Linear`; None if that cannot have this form on this machine."""


def replace_linears(module: nn.Module, form: LinearForm) -> None:
    """Replace every `Linear` inside `module` by what `form` returns for it. If that is None, keep it."""
    for name, child in module.named_children():
        if not isinstance(child, Linear):
            replace_linears(child, form)
        elif (made := form(child)) is not None:
            setattr(module, name, made)


# This many rows of a half-precision head are converted to fp32 at a time.
_HEAD_ROWS = 16384


def scores(head: nn.Module, hidden: Tensor, exact: bool = False) -> Tensor:
    """The head's scores in fp32, whatever the dtype of its weights: rounded scores would often tie.

    If `exact`, by our kernels, with the same bits for a row whatever the other rows are.
    """
    own = getattr(head, "scores", None)
    if own is not None:
        return own(hidden, exact)
    if exact:
        from longspec.kernels.norm import Residual

        assert isinstance(head, Linear)
        product: Tensor = head.few_rows(Residual(hidden), exact=True, dtype=torch.float32)[0].x
        return product
    if not isinstance(head, Linear) or head.weight.dtype == torch.float32:
        return head(hidden)
    return wide_product(hidden, head.weight)


def wide_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T in fp32, both in half precision."""
    if weight.is_cuda and not torch.is_grad_enabled():
        flat = hidden.reshape(-1, hidden.shape[-1])
        return torch.mm(flat, weight.T, out_dtype=torch.float32).view(*hidden.shape[:-1], -1)
    return torch.cat([F.linear(hidden.float(), part.float()) for part in weight.split(_HEAD_ROWS)], -1)


Table = Tensor | nn.Module
"""An embedding [V, E], or a form of it in fewer bytes, which gives the rows of tokens."""


def look_up(table: Table, tokens: Tensor) -> Tensor:
    """The rows [..., E] of an embedding that tokens [...] name."""
    if isinstance(table, Tensor):
        return F.embedding(tokens, table)
    rows: Tensor = table(tokens)
    return rows


Rope = tuple[Tensor, Tensor]
"""cos and sin of the tokens' positions."""
Reader = tuple[RMSNorm, Linear]
"""A norm of the residual stream, and the projection that follows it."""


class SelfAttention(nn.Module):
    """Grouped-query self-attention of one layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        num_qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = Linear(config.hidden_size, num_qkv, config.qkv_bias)
        self.output = Linear(config.num_heads * config.head_dim, config.hidden_size, config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else None

    def heads(self, qkv: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, D], keys and values [B, T, K, D] of a projection [B, T, (H + 2 K) D]."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((self.num_heads, self.num_kv_heads), 2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 2)
        q, k = rotate(qk, *rope).split((self.num_heads, self.num_kv_heads), 2)
        return q, k, v


class FeedForward(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size)
        self.down = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(x))

    def gated(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return F.silu(gate).mul_(up) if not torch.is_grad_enabled() else F.silu(gate) * up


class Block(nn.Module):
    """One decoder layer: attention, then feed-forward, each with a norm before it and a residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.attention = SelfAttention(config, layer)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.ffn = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, stream: Stream, run: ForwardPass, following: Reader | None = None) -> Stream:
        """The residual stream after this layer; `following` reads it next."""
        qkv, stream = self.enter(stream, run.ops)
        out = run.attend(self.attention, qkv)
        if out.shape[1] < qkv.shape[1]:
            stream = run.ops.last(stream, out.shape[1])
        return self.leave(stream, out, run.ops, following)

    def enter(self, stream: Stream, ops: Ops) -> tuple[Tensor, Stream]:
        """Norm the stream and project it to queries, keys and values."""
        return ops.normed_linear(self.reader, stream)

    def leave(self, stream: Stream, out: Tensor, ops: Ops, following: Reader | None) -> Stream:
        """Add attention's result `out` to the stream, then the feed-forward."""
        stream = ops.add_linear(self.attention.output, out, stream, (self.ffn_norm, self.ffn.gate_up))
        return ops.feed_forward(self.ffn, self.ffn_norm, stream, following)

    @property
    def reader(self) -> Reader:
        """The norm and projection that read the stream first."""
        return self.attention_norm, self.attention.qkv


class Ops(Protocol):
    """What is computed around products: with torch's operations, or fused into our kernels."""

    def embed(
        self, tokens: Tensor, table: Table, added: Tensor | None, following: Reader
    ) -> tuple[Stream, Stream]:
        """The rows of an embedding that tokens [B, T] name, for `following` to read; and the stream with
        `added` [B, T or 1, E] on top."""
        ...

    def normed_linear(self, reader: Reader, stream: Stream) -> tuple[Tensor, Stream]:
        """The projection of the normed stream, and the complete stream."""
        ...

    def last(self, stream: Stream, num_tokens: int) -> Stream:
        """The stream of the last tokens only; it must be complete."""
        ...

    def add_linear(self, linear: Linear, x: Tensor, stream: Stream, following: Reader | None) -> Stream:
        """The stream plus the projection of x. It may overwrite the given stream."""
        ...

    def feed_forward(
        self, ffn: FeedForward, norm: RMSNorm, stream: Stream, following: Reader | None
    ) -> Stream: ...

    def finish(self, stream: Stream, norm: RMSNorm | None) -> Tensor:
        """The stream as a tensor, normed if there is a norm."""
        ...


class PlainOps:
    """With torch's operations: on any device, with gradients. The stream is a tensor."""

    def embed(
        self, tokens: Tensor, table: Table, added: Tensor | None, following: Reader
    ) -> tuple[Stream, Stream]:
        x = look_up(table, tokens)
        return x, x if added is None else x + added

    def normed_linear(self, reader: Reader, stream: Stream) -> tuple[Tensor, Stream]:
        norm, linear = reader
        return linear(norm(stream)), stream

    def last(self, stream: Stream, num_tokens: int) -> Stream:
        return stream[:, -num_tokens:]

    def add_linear(self, linear: Linear, x: Tensor, stream: Stream, following: Reader | None) -> Stream:
        return stream + linear(x) if isinstance(linear, Linear) else linear.add_to(stream, x)

    def feed_forward(
        self, ffn: FeedForward, norm: RMSNorm, stream: Stream, following: Reader | None
    ) -> Stream:
        return self.add_linear(ffn.down, ffn.gated(norm(stream)), stream, following)

    def finish(self, stream: Stream, norm: RMSNorm | None) -> Tensor:
        return stream if norm is None else norm(stream)


PLAIN = PlainOps()
