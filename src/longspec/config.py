"""The shape of a model, read once from its Hugging Face config and never changed afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longspec.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
# Nodes per depth of the tree that is drafted. With its root 64: one more, and a GPU works as for 128.
DEFAULT_TREE = (4, 16, 16, 16, 11)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base frequency and how it is stretched to longer contexts."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    """Context the model was trained on before stretching (llama3 and yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """What yarn multiplies cos and sin by; derived from `factor` where the config is silent."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """Everything the `Transformer` needs to know; a model family is a few of these flags."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    """Context the model was made for, rope scaling included."""
    rms_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "head_dim",
            "max_length",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"the model config has {name} = {getattr(self, name)}; it must be positive")
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd; rotary embedding needs an even one")

    @property
    def num_parameters(self) -> int:
        """Weights in the model, a tied head counted once."""
        attention = self.head_dim * (self.num_heads + self.num_kv_heads)
        layer = 2 * self.hidden_size * attention + 3 * self.hidden_size * self.intermediate_size
        layer += 2 * self.hidden_size
        layer += self.head_dim * (self.num_heads + 2 * self.num_kv_heads) * self.qkv_bias
        layer += self.hidden_size * self.output_bias + 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Cache bytes that one token of context takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    @classmethod
    def from_hf(cls, config: Any) -> ModelConfig:
        """Read a `transformers` config object, or the dict of a `config.json`; old and new spellings."""
        raw: dict[str, Any] = dict(config if isinstance(config, Mapping) else config.to_dict())
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise UserError(
                f"model_type {family!r} is not supported; the supported ones are {_list(FAMILIES)}"
            )
        _refuse_unsupported(raw)
        heads = _number(raw, "num_attention_heads")
        hidden = _number(raw, "hidden_size")
        positions = _number(raw, "max_position_embeddings")
        rope = _rope_from_hf(raw, positions)
        bias = bool(raw.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=_number(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_number(raw, "intermediate_size"),
            num_layers=_number(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_number(raw, "num_key_value_heads", heads),
            head_dim=_number(raw, "head_dim", 128 if family == "qwen3" else hidden // heads),
            max_length=_context_limit(rope, positions),
            rms_eps=_real(raw, "rms_norm_eps", 1e-6),
            rope=rope,
            qkv_bias=family == "qwen2" or bias,
            output_bias=family != "qwen2" and bias,
            qk_norm=family == "qwen3",
            tied_head=bool(raw.get("tie_word_embeddings", False)),
        )


@dataclass(frozen=True)
class DraftConfig:
    """The draft's architecture beyond what it takes from its target; the default is GLIDE as published."""

    window: int = 512
    """How many positions of its own the draft sees: a key at k from a query at q where q - k < window."""
    max_lag: int = 8
    """The deepest level it was trained to draft."""
    cross_layers: tuple[int, ...] = (-1,)
    """The target's layers whose KV it reads; negative ones count from the last."""
    use_feature: bool = False
    """Whether it is given the target's final hidden state at the newest verified token."""
    qkv_bias: bool = True
    final_norm: bool = False
    draft_vocab: int = 0
    """How many tokens its head can propose; 0 is the whole vocabulary."""
    intermediate_size: int = 0
    """The width of its feed-forward; 0 is the target's."""
    lag_gate: bool = False
    """Whether it is told how far it lags: by that, what the hidden state adds is scaled and shifted."""

    def __post_init__(self) -> None:
        for name in ("window", "max_lag"):
            if getattr(self, name) < 1:
                raise UserError(f"the draft config has {name} = {getattr(self, name)}; it must be at least 1")
        object.__setattr__(self, "cross_layers", tuple(self.cross_layers))  # a config file has a list
        if not self.cross_layers:
            raise UserError("the draft config has no cross_layers; it needs at least one")
        if self.draft_vocab < 0:
            raise UserError(
                f"the draft config has draft_vocab = {self.draft_vocab}; 0 is the whole vocabulary"
            )
        if self.lag_gate and not self.use_feature:
            raise UserError("the draft config has lag_gate without use_feature; there is nothing to gate")
        if self.intermediate_size < 0:
            raise UserError(
                f"the draft config has intermediate_size = {self.intermediate_size}; 0 is the target's"
            )

    def num_parameters(self, target: ModelConfig) -> int:
        """Weights in the draft, without the target's embedding and head."""
        hidden, heads = target.hidden_size, target.num_heads * target.head_dim
        num_qkv = heads + 2 * target.num_kv_heads * target.head_dim
        num_cross = len(self.layers_of(target)) * heads
        ffn = 3 * hidden * self.ffn_size(target)
        own = hidden * (num_qkv + heads) + 2 * hidden * num_cross + ffn
        bias = (num_qkv + num_cross) * self.qkv_bias
        feature = hidden * (hidden * self.use_feature + 2 * self.max_lag * self.lag_gate)
        return own + bias + feature + hidden * (3 + self.final_norm)

    def ffn_size(self, target: ModelConfig) -> int:
        """How wide its feed-forward is."""
        return self.intermediate_size or target.intermediate_size

    def layers_of(self, target: ModelConfig) -> tuple[int, ...]:
        """`cross_layers` as indices into the target's layers."""
        num_layers = target.num_layers
        for layer in self.cross_layers:
            if not -num_layers <= layer < num_layers:
                raise UserError(f"cross layer {layer} is not among the target's {num_layers} layers")
        return tuple(layer % num_layers for layer in self.cross_layers)


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    """Name what we would otherwise run wrongly."""
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UserError(f"hidden_act {raw['hidden_act']!r} is not supported; only 'silu' is")
    if raw.get("mlp_bias"):
        raise UserError("mlp_bias = true is not supported")
    layers = raw.get("layer_types")
    if "sliding_attention" in layers if isinstance(layers, list | tuple) else _uses_window(raw):
        raise UserError(
            f"sliding-window attention (sliding_window = {raw.get('sliding_window')}) is not supported; "
            "if the model also runs without it, set use_sliding_window = false in its config.json"
        )
    partial = (_section(raw, "rope_parameters") or raw).get("partial_rotary_factor", 1.0)
    if partial not in (None, 1.0):
        raise UserError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")
    if raw.get("quantization_config"):
        method = _section(raw, "quantization_config").get("quant_method", "unknown")
        raise UserError(
            f"weights quantised with {method!r} are not supported; use the original weights or a GGUF"
        )


def _uses_window(raw: dict[str, Any]) -> bool:
    return bool(
        raw.get("use_sliding_window")
        and raw.get("sliding_window")
        and _number(raw, "max_window_layers", 0, least=0) < _number(raw, "num_hidden_layers")
    )


def _rope_from_hf(raw: dict[str, Any], positions: int) -> RopeConfig:
    values = _section(raw, "rope_scaling") | _section(raw, "rope_parameters")
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UserError(f"rope scaling {kind!r} is not supported; the supported ones are {_list(ROPE_KINDS)}")
    theta = _real(values, "rope_theta", _real(raw, "rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if values.get("factor") is None:
        raise UserError(f"rope scaling {kind!r} needs a 'factor', and the config has none")
    names = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    known = {name: _real(values, name) for name in names if values.get(name) is not None}
    # As in transformers, 0 is none.
    known |= {name: _real(values, name) for name in ("mscale", "mscale_all_dim") if values.get(name)}
    original = "original_max_position_embeddings"
    rope = RopeConfig(
        theta=theta,
        kind=kind,
        factor=_real(values, "factor"),
        original_length=_number(values, original, _number(raw, original, positions)),
        truncate=bool(values.get("truncate", True)),
        **known,
    )
    if kind == "yarn" and theta == 1:
        raise UserError("the model config has rope_theta = 1; yarn needs another one")
    if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise UserError(
            f"the model config has low_freq_factor = {rope.low_freq_factor}; it must be below its "
            f"high_freq_factor = {rope.high_freq_factor}"
        )
    return rope


def _context_limit(rope: RopeConfig, positions: int) -> int:
    """The context, where some configs give what was before stretching and others what comes out of it."""
    stretched = int(rope.factor * rope.original_length) if rope.kind in ("linear", "yarn") else 0
    return max(positions, stretched)


def _section(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """An object within the config; empty where there is none."""
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"the model config has {name} = {value!r}; an object is needed")
    return dict(value or {})


def _number(raw: dict[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"the model config has {name} = {value!r}; a whole number from {least} up is needed")
    return value


def _real(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UserError(f"the model config has {name} = {value!r}; a number above 0 is needed")
    return float(value)


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names)
