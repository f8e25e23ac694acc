"""A model family: how to read its Hugging Face config, and the names of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from longspec.config import ROPE_KINDS, ModelConfig, RopeConfig
from longspec.errors import UserError, flag, number, shown
from longspec.models.families.quantisation import read_quantisation

# The largest size and the most layers that a config may name: larger numbers are mistakes or attacks.
_MOST, _MOST_LAYERS = 2**31 - 1, 4096


class Family:
    """Decoder-only models of one `model_type`. A family overrides only what differs from this class."""

    name: ClassVar[str]
    """Hugging Face's `model_type`."""

    def flags(self, raw: Mapping[str, Any]) -> dict[str, bool]:
        """The flags of `ModelConfig` that this config switches on."""
        raise NotImplementedError

    def default_head_dim(self, hidden_size: int, num_heads: int) -> int:
        """The head size if the config does not give one."""
        return hidden_size // num_heads

    def window(self, raw: Mapping[str, Any]) -> int | None:
        """The sliding window, if any layer has one; None if every layer sees all tokens."""
        layers = raw.get("layer_types")
        if isinstance(layers, list | tuple):
            return read_count(raw, "sliding_window") if "sliding_attention" in layers else None
        if not raw.get("use_sliding_window") or not raw.get("sliding_window"):
            return None
        first = read_count(raw, "max_window_layers", 0, least=0)
        return read_count(raw, "sliding_window") if first < read_count(raw, "num_hidden_layers") else None

    def read(self, raw: Mapping[str, Any]) -> ModelConfig:
        """The shape of a model, from the values of its `config.json` in old or new spelling."""
        self._refuse_unsupported(raw)
        heads, hidden = read_count(raw, "num_attention_heads"), read_count(raw, "hidden_size")
        positions = read_count(raw, "max_position_embeddings")
        rope = _read_rope(raw, positions)
        return ModelConfig(
            family=self.name,
            vocab_size=read_count(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=read_count(raw, "intermediate_size"),
            num_layers=read_count(raw, "num_hidden_layers", most=_MOST_LAYERS),
            num_heads=heads,
            num_kv_heads=read_count(raw, "num_key_value_heads", heads),
            head_dim=read_count(raw, "head_dim", self.default_head_dim(hidden, heads)),
            max_length=_context_limit(rope, positions),
            rms_eps=_read_real(raw, "rms_norm_eps", 1e-6),
            rope=rope,
            tied_head=read_flag(raw, "tie_word_embeddings", False),
            quantisation=read_quantisation(raw),
            **self.flags(raw),
        )

    def weights(self, config: ModelConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Our parameter names, each with the checkpoint's names whose rows it joins."""
        yield "embedding", ("model.embed_tokens.weight",)
        for layer in range(config.num_layers):
            ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
            yield ours + "attention_norm.weight", (theirs + "input_layernorm.weight",)
            yield ours + "ffn_norm.weight", (theirs + "post_attention_layernorm.weight",)
            projections = tuple(f"{theirs}self_attn.{name}_proj." for name in "qkv")
            yield ours + "attention.qkv.weight", tuple(name + "weight" for name in projections)
            if config.qkv_bias:
                yield ours + "attention.qkv.bias", tuple(name + "bias" for name in projections)
            yield ours + "attention.output.weight", (theirs + "self_attn.o_proj.weight",)
            if config.output_bias:
                yield ours + "attention.output.bias", (theirs + "self_attn.o_proj.bias",)
            if config.qk_norm:
                yield ours + "attention.q_norm.weight", (theirs + "self_attn.q_norm.weight",)
                yield ours + "attention.k_norm.weight", (theirs + "self_attn.k_norm.weight",)
            gate_up = (theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight")
            yield ours + "ffn.gate_up.weight", gate_up
            yield ours + "ffn.down.weight", (theirs + "mlp.down_proj.weight",)
        yield "norm.weight", ("model.norm.weight",)
        if not config.tied_head:
            yield "head.weight", ("lm_head.weight",)

    def _refuse_unsupported(self, raw: Mapping[str, Any]) -> None:
        """Refuse by name what would run but give wrong results."""
        if raw.get("hidden_act", "silu") not in ("silu", "swish"):
            raise UserError(f"hidden_act {raw['hidden_act']!r} is not supported; only 'silu' is")
        if raw.get("mlp_bias"):
            raise UserError("mlp_bias = true is not supported")
        window = self.window(raw)
        if window is not None:
            raise UserError(
                f"sliding-window attention (sliding_window = {window}) is not supported; if the model also "
                "runs without it, set sliding_window = null in its config.json"
            )
        partial = (_read_section(raw, "rope_parameters") or raw).get("partial_rotary_factor", 1.0)
        if partial not in (None, 1.0):
            raise UserError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")


def _read_rope(raw: Mapping[str, Any], positions: int) -> RopeConfig:
    values = _read_section(raw, "rope_scaling") | _read_section(raw, "rope_parameters")
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UserError(
            f"rope scaling {kind!r} is not supported; the supported ones are {', '.join(ROPE_KINDS)}"
        )
    theta = _read_real(values, "rope_theta", _read_real(raw, "rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if values.get("factor") is None:
        raise UserError(f"rope scaling {kind!r} needs a 'factor', and the config has none")
    names = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    known = {name: _read_real(values, name) for name in names if values.get(name) is not None}
    # As in transformers, 0 means not given.
    known |= {name: _read_real(values, name) for name in ("mscale", "mscale_all_dim") if values.get(name)}
    original = "original_max_position_embeddings"
    rope = RopeConfig(
        theta=theta,
        kind=kind,
        factor=_read_real(values, "factor"),
        original_length=read_count(values, original, read_count(raw, original, positions)),
        truncate=read_flag(values, "truncate", True),
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
    """The longest context. Some configs give it before rope scaling and others after."""
    stretched = rope.factor * rope.original_length if rope.kind in ("linear", "yarn") else 0
    if stretched > _MOST:
        raise UserError(f"the model config has a rope factor of {rope.factor:g}; no context is that long")
    return max(positions, int(stretched))


def _read_section(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object inside the config; empty if there is none."""
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"the model config has {name} = {shown(value)}; an object is needed")
    return dict(value or {})


def read_count(
    raw: Mapping[str, Any], name: str, default: int | None = None, least: int = 1, most: int = _MOST
) -> int:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UserError(
            f"the model config has {name} = {shown(value)}; a whole number from {least} to {most} is needed"
        )
    return value


def read_flag(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    return default if raw.get(name) is None else flag(f"the model config's {name}", raw[name])


def _read_real(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = number(f"the model config's {name}", default if raw.get(name) is None else raw[name])
    if value <= 0:
        raise UserError(f"the model config has {name} = {value}; a number above 0 is needed")
    return value
