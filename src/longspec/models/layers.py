"""The parts of a decoder layer."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.config import ModelConfig
from longspec.models.rope import rotate

Stream = Any
"""The residual stream between two products, in the form that the `Ops` at work give it."""


class ForwardPass(Protocol):
    """What all layers of one forward pass share. Decoding, plain or fused, and training bring their own."""

    @property
    def ops(self) -> Ops:
        """What the small work around products is done by."""
        ...

    def attend(self, module: SelfAttention, qkv: Tensor) -> Tensor:
        """Attend by a layer's projection [B, T, (H + 2 K) D] of the new tokens; returns [B, T, H D], or of
        the last tokens only, where nobody asks for the others."""
        ...


class RMSNorm(nn.Module):
    """Scale to unit root mean square, then by a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x; the mean square is taken in fp32."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Linear(nn.Linear):
    """A matrix, and a bias where the family has one; not filled until weights are loaded or drawn.

    A linear owns its product: called, it takes any number of rows; `few_rows` is for few of them on a GPU,
    with the small work around the product in the same launch.
    """

    bias: nn.Parameter | None  # type: ignore[assignment]  # torch declares that there always is one

    def __init__(self, num_in: int, num_out: int, bias: bool = False) -> None:
        super().__init__(num_in, num_out, bias)

    def reset_parameters(self) -> None:
        """Nothing: torch would fill what is about to be replaced."""

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """The product of x [..., in] added to `total` [..., out], in its place where that can be, because the
        sum then needs no pass over memory of its own."""
        if self.bias is not None or not total.is_contiguous():
            return total + self(x)
        total.view(-1, total.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), self.weight.T)
        return total

    def covers(self, x: Tensor) -> bool:
        """Whether `few_rows` is for this product."""
        from longspec.kernels.linear import covers

        return covers(x, self.weight)

    def folds(self, num_rows: int) -> bool:
        """Whether `few_rows` wants what its norm needs made ahead, by whoever makes the stream."""
        from longspec.kernels.linear import folds

        return folds(num_rows, self.weight)

    def few_rows(self, x: Any, **around: Any) -> tuple[Any, Any]:
        """The product of few rows; see `longspec.kernels.linear.few_rows` for what can be around it."""
        from longspec.kernels.linear import few_rows

        return few_rows(x, self.weight, self.bias, **around)


class PackedLinear(nn.Module):
    """A frozen fp32 `Linear` on the CPU, its weight in oneDNN's blocked layout.

    Reading the weights bounds decoding on a CPU; this layout streams them about twice as fast as a plain
    matrix does, for one row and for a tree of rows alike. The plain copy is dropped.
    """

    # oneDNN has a slower kernel for fewer rows than this: 1 row took 20 ms where 4 rows took 15.
    MIN_ROWS = 4

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.num_out = linear.weight.shape[0]
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 8)
        self.bias = None if linear.bias is None else linear.bias.detach()

    @staticmethod
    def supports(linear: Linear) -> bool:
        """Whether this build of torch can pack it."""
        weight = linear.weight
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias."""
        rows = x.numel() // x.shape[-1]
        if rows >= self.MIN_ROWS:
            return self._apply_packed(x)
        padded = F.pad(x.reshape(rows, -1), (0, 0, 0, self.MIN_ROWS - rows))
        return self._apply_packed(padded)[:rows].view(*x.shape[:-1], self.num_out)

    def covers(self, x: Tensor) -> bool:
        return False

    def folds(self, num_rows: int) -> bool:
        return False

    def _apply_packed(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class LinearForm(Protocol):
    """Another form of a `Linear`: a class of modules, made from one."""

    def __call__(self, linear: Linear) -> nn.Module:
        """The other form of `linear`."""
        ...

    def supports(self, linear: Linear) -> bool:
        """Whether `linear` has it here."""
        ...


def replace_linears(module: nn.Module, form: LinearForm) -> None:
    """Replace every `Linear` below `module` that supports it by another form."""
    for name, child in module.named_children():
        if isinstance(child, Linear) and form.supports(child):
            setattr(module, name, form(child))
        else:
            replace_linears(child, form)


def pack_linears(module: nn.Module) -> None:
    """Replace every `Linear` below `module` that can be packed by its packed form."""
    replace_linears(module, PackedLinear)


# So much of a half-precision head is turned into fp32 at a time.
_HEAD_ROWS = 16384


def scores(head: nn.Module, hidden: Tensor) -> Tensor:
    """The head's scores in fp32, whatever the type of its weights: rounded to that, near ones would tie."""
    if not isinstance(head, Linear) or head.weight.dtype == torch.float32:
        return head(hidden)
    weight = head.weight
    if weight.is_cuda and not torch.is_grad_enabled():
        flat = hidden.reshape(-1, hidden.shape[-1])
        return torch.mm(flat, weight.T, out_dtype=torch.float32).view(*hidden.shape[:-1], -1)
    return torch.cat([F.linear(hidden.float(), part.float()) for part in weight.split(_HEAD_ROWS)], -1)


Rope = tuple[Tensor, Tensor]
"""cos and sin of the tokens' positions."""
Reader = tuple[RMSNorm, Linear]
"""A norm of the residual stream, and the projection of what it gives."""


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
        """Return down(silu(gate(x)) * up(x))."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up) if not torch.is_grad_enabled() else F.silu(gate) * up)


class Block(nn.Module):
    """One decoder layer: attention, then feed-forward, each behind a norm and a residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.attention = SelfAttention(config, layer)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.ffn = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, stream: Stream, run: ForwardPass, following: Reader | None = None) -> Stream:
        """The residual stream after this layer, for `following` to read."""
        qkv, stream = self.enter(stream, run.ops)
        out = run.attend(self.attention, qkv)
        if out.shape[1] < qkv.shape[1]:
            stream = run.ops.last(stream, out.shape[1])
        return self.leave(stream, out, run.ops, following)

    def enter(self, stream: Stream, ops: Ops) -> tuple[Tensor, Stream]:
        """What comes before attention: its projection."""
        return ops.normed_linear(self.reader, stream)

    def leave(self, stream: Stream, out: Tensor, ops: Ops, following: Reader | None) -> Stream:
        """What comes behind it."""
        stream = ops.add_linear(self.attention.output, out, stream, (self.ffn_norm, self.ffn.gate_up))
        return ops.feed_forward(self.ffn, self.ffn_norm, stream, following)

    @property
    def reader(self) -> Reader:
        """What reads the stream first."""
        return self.attention_norm, self.attention.qkv


class Ops(Protocol):
    """The small work around products: by torch's operations, or fused into our kernels."""

    def embed(
        self, tokens: Tensor, table: Tensor, added: Tensor | None, following: Reader
    ) -> tuple[Stream, Stream]:
        """The rows of table [V, E] that tokens [B, T] name, for `following` to read; and the stream with
        `added` [B, T or 1, E] on top."""
        ...

    def normed_linear(self, reader: Reader, stream: Stream) -> tuple[Tensor, Stream]:
        """The projection of the normed stream, and the stream with nothing lacking."""
        ...

    def last(self, stream: Stream, num_tokens: int) -> Stream:
        """The stream of the last tokens alone; nothing may be lacking in it."""
        ...

    def add_linear(self, linear: Linear, x: Tensor, stream: Stream, following: Reader | None) -> Stream:
        """The stream with the projection of x added to it; the stream that was given is used up."""
        ...

    def feed_forward(
        self, ffn: FeedForward, norm: RMSNorm, stream: Stream, following: Reader | None
    ) -> Stream:
        """The stream behind the feed-forward."""
        ...

    def finish(self, stream: Stream, norm: RMSNorm | None) -> Tensor:
        """The stream as a tensor, normed where there is a norm."""
        ...


class PlainOps:
    """By torch's operations: on any device, and with gradients. The stream is a tensor."""

    def embed(
        self, tokens: Tensor, table: Tensor, added: Tensor | None, following: Reader
    ) -> tuple[Stream, Stream]:
        x = F.embedding(tokens, table)
        return x, x if added is None else x + added

    def normed_linear(self, reader: Reader, stream: Stream) -> tuple[Tensor, Stream]:
        norm, linear = reader
        return linear(norm(stream)), stream

    def last(self, stream: Stream, num_tokens: int) -> Stream:
        return stream[:, -num_tokens:]

    def add_linear(self, linear: Linear, x: Tensor, stream: Stream, following: Reader | None) -> Stream:
        return stream + linear(x)

    def feed_forward(
        self, ffn: FeedForward, norm: RMSNorm, stream: Stream, following: Reader | None
    ) -> Stream:
        return stream + ffn(norm(stream))

    def finish(self, stream: Stream, norm: RMSNorm | None) -> Tensor:
        return stream if norm is None else norm(stream)


PLAIN = PlainOps()
