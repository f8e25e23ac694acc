"""The shapes of a target and of a draft. They never change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from longspec.errors import UserError, shown

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
# The default tree, as nodes per depth. With its root it has 64 nodes: a tile of our kernels has 64 rows.
DEFAULT_TREE = (4, 16, 16, 16, 11)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base frequency and how it is scaled to longer contexts."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    """The context that the model was trained on before scaling (llama3 and yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """The factor of cos and sin for yarn; derived from `factor` if the config does not give it."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint's matrices are quantised."""

    method: str
    """Hugging Face's `quant_method`."""
    kind: str
    """"int8" or "fp8"."""
    block: tuple[int, int] | None = None
    """The rows and columns of a matrix that share a scale; None where whole rows or parts of rows do."""
    packed: bool = False
    """Whether four values stand in a word of 32 bits."""
    plain: tuple[str, ...] = ()
    """The modules that are not quantised: names, or patterns that begin with "re:"."""
    suffix: str = "_scale"
    """What the name of a weight's scales ends with."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a `Transformer`. `longspec.models.families` reads it from a Hugging Face config; families
    differ in the flags at the end."""

    family: str
    """Hugging Face's `model_type`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    """The longest context, with rope scaling."""
    rms_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    quantisation: Quantisation | None = field(default=None, repr=False)
    """Of the checkpoint; None if it is not quantised."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "head_dim", "max_length")
        for name in sizes:
            if getattr(self, name) < 1:
                raise UserError(f"the model config has {name} = {getattr(self, name)}; it must be positive")
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd; rotary embedding needs an even one")

    @property
    def num_parameters(self) -> int:
        """A tied head counts once."""
        attention = self.head_dim * (self.num_heads + self.num_kv_heads)
        layer = 2 * self.hidden_size * attention + 3 * self.hidden_size * self.intermediate_size
        layer += 2 * self.hidden_size
        layer += self.head_dim * (self.num_heads + 2 * self.num_kv_heads) * self.qkv_bias
        layer += self.hidden_size * self.output_bias + 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def shared_by(self, num_ranks: int) -> ModelConfig:
        """The shape of what each of so many ranks holds: some heads, some of the feed-forward's width and
        some rows of the vocabulary."""
        for name, ours in _DIVIDED.items():
            if getattr(self, ours) % num_ranks:
                raise UserError(
                    f"tensor_parallel {num_ranks} does not divide the target's {name} of "
                    f"{getattr(self, ours)}; use {_divisors(self)}"
                )
        shares = {ours: getattr(self, ours) // num_ranks for ours in _DIVIDED.values()}
        return replace(self, vocab_size=-(-self.vocab_size // num_ranks), **shares)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """The bytes of KV of one token, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


# The sizes that the ranks divide among themselves: the name in a Hugging Face config, and ours.
_DIVIDED = {
    "num_key_value_heads": "num_kv_heads",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
}


def _divisors(config: ModelConfig) -> str:
    """The numbers of ranks that can share a model, as text."""
    common = math.gcd(*(getattr(config, ours) for ours in _DIVIDED.values()))
    return " or ".join(str(one) for one in range(1, common + 1) if common % one == 0)


@dataclass(frozen=True)
class DraftConfig:
    """The draft's architecture; its sizes are those of its target. The default is GLIDE as published."""

    window: int = 512
    """How far the draft sees its own tokens: a query at q sees a key at k if q - k < window."""
    max_lag: int = 8
    """The deepest level that it was trained to draft."""
    cross_layers: tuple[int, ...] = (-1,)
    """The target's layers whose KV it reads; negative numbers count from the last layer."""
    use_feature: bool = False
    """Whether it reads the target's final hidden state at the newest verified token."""
    qkv_bias: bool = True
    final_norm: bool = False
    draft_vocab: int = 0
    """How many tokens it can propose; 0 is the whole vocabulary."""
    intermediate_size: int = 0
    """The width of its feed-forward; 0 is the target's."""
    lag_gate: bool = False
    """Whether what the hidden state adds is scaled and shifted by vectors for each lag."""
    use_parent: bool = False
    """Whether a node also reads the draft's own hidden state at its parent. The draft then learns all lags of
    a sequence together, each from the one below it."""

    def __post_init__(self) -> None:
        bounds = {
            "window": (1, 2**20),
            "max_lag": (1, 512),
            "draft_vocab": (0, 2**31 - 1),  # 0 is the whole vocabulary
            "intermediate_size": (0, 2**31 - 1),  # 0 is the target's
        }
        for name, (least, most) in bounds.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise UserError(
                    f"the draft config has {name} = {shown(value)}; it must lie between {least} and {most}"
                )
        object.__setattr__(self, "cross_layers", tuple(self.cross_layers))  # a config file has a list
        if not self.cross_layers:
            raise UserError("the draft config has no cross_layers; it needs at least one")
        if self.lag_gate and not self.use_feature:
            raise UserError("the draft config has lag_gate without use_feature; there is nothing to gate")

    def num_parameters(self, target: ModelConfig) -> int:
        """Without the target's embedding and head."""
        hidden, heads = target.hidden_size, target.num_heads * target.head_dim
        num_qkv = heads + 2 * target.num_kv_heads * target.head_dim
        num_cross = len(self.layers_of(target)) * heads
        ffn = 3 * hidden * self.ffn_size(target)
        own = hidden * (num_qkv + heads) + 2 * hidden * num_cross + ffn
        bias = (num_qkv + num_cross) * self.qkv_bias
        feature = hidden * (hidden * self.use_feature + 2 * self.max_lag * self.lag_gate)
        parent = hidden * (hidden + 1) * self.use_parent
        return own + bias + feature + parent + hidden * (3 + self.final_norm)

    def ffn_size(self, target: ModelConfig) -> int:
        return self.intermediate_size or target.intermediate_size

    def shared_by(self, num_ranks: int) -> DraftConfig:
        """What each of so many ranks holds; the rest follows from its share of the target."""
        if self.intermediate_size % num_ranks:
            raise UserError(
                f"tensor_parallel {num_ranks} does not divide the draft's intermediate_size of "
                f"{self.intermediate_size}; use another number, or no draft"
            )
        return replace(self, intermediate_size=self.intermediate_size // num_ranks)

    def layers_of(self, target: ModelConfig) -> tuple[int, ...]:
        """`cross_layers` as indices into the target's layers."""
        num_layers = target.num_layers
        for layer in self.cross_layers:
            if not -num_layers <= layer < num_layers:
                raise UserError(f"cross layer {layer} is not among the target's {num_layers} layers")
        return tuple(layer % num_layers for layer in self.cross_layers)
