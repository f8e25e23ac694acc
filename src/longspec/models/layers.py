"""The parts of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.attention import Attention, AttentionPlan
from longspec.cache import KVCache, Slots
from longspec.config import ModelConfig
from longspec.models.rope import RopeTable, rotate


class ForwardPass(Protocol):
    """What all layers of one forward pass share. Decoding and training bring their own."""

    @property
    def rope(self) -> tuple[Tensor, Tensor]:
        """cos and sin of the tokens' positions."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with queries [B, T, H, D]; the keys and values [B, T, K, D] are those of the same tokens."""
        ...


@dataclass(frozen=True)
class CachedPass:
    """A pass over tokens that follow what is in a cache, and join it."""

    cache: KVCache
    slots: Slots
    """Where the new tokens' keys and values go."""
    positions: Tensor
    table: RopeTable
    attention: Attention
    plan: AttentionPlan

    @cached_property
    def rope(self) -> tuple[Tensor, Tensor]:
        """See `ForwardPass.rope`."""
        return self.table(self.positions)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the new keys and values past the prefix, then attend to the prefix and to them."""
        self.cache.write(layer, self.slots, k, v)
        return self.attention.attend(q, *self.cache.layer(layer), self.plan)[0]


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
    """A matrix, and a bias where the family has one; not filled until weights are loaded or drawn."""

    def __init__(self, num_in: int, num_out: int, bias: bool = False) -> None:
        super().__init__(num_in, num_out, bias)

    def reset_parameters(self) -> None:
        """Nothing: torch would fill what is about to be replaced."""


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

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, D], keys and values [B, T, K, D] of x [B, T, E]."""
        B, T, _ = x.shape
        heads = self.qkv(x).view(B, T, -1, self.head_dim)
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

    def forward(self, x: Tensor, run: ForwardPass) -> Tensor:
        """Return the residual stream after this layer."""
        out = run.attend(self.attention.layer, *self.enter(x, run.rope))
        return self.leave(x, out)

    def enter(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What comes before attention: queries, keys and values."""
        return self.attention.project(self.attention_norm(x), rope)

    def leave(self, x: Tensor, out: Tensor) -> Tensor:
        """What comes behind it, of the attention's result [B, T, H, D]."""
        x = x + self.attention.output(out.flatten(2))
        return x + self.ffn(self.ffn_norm(x))
