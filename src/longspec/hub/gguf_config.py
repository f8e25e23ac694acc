"""Translate GGUF metadata to a Hugging Face config, and GGUF tensor names to Hugging Face names."""

import math
from dataclasses import dataclass
from typing import Any

from longspec.errors import UserError
from longspec.hub.gguf_header import GGUFHeader, shortened

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FREQS = "rope_freqs.weight"

# Tokens that end a turn but are missing in the eos keys of some files.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>")
# Keys of model variants that this package does not run.
_REFUSED_KEYS = ("expert_count", "attention.sliding_window", "attention.scale", "logit_scale")


@dataclass(frozen=True)
class Weight:
    """One tensor with its GGUF and Hugging Face names."""

    gguf_name: str
    hf_name: str
    shape: tuple[int, ...]
    num_heads: int = 0
    """The number of heads if GGUF stores the rows in its own rotary order; 0 if as in Hugging Face."""


class Metadata:
    """Typed access to a header's metadata: wrong types and impossible values give a `UserError`."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.arch = ""
        self.arch = self.text("general.architecture")
        if self.arch not in FAMILIES:
            raise self.refuse(f"the architecture {self.arch!r}; use one of {', '.join(FAMILIES)}")

    def refuse(self, what: str) -> UserError:
        """The error for valid files that this package does not run."""
        return UserError(f"{self.header.path}: longspec does not support {shortened(what)}")

    def get(self, key: str) -> Any:
        """The raw value; a key that begins with a dot gets the architecture in front."""
        return self.header.metadata.get(self.arch + key if key.startswith(".") else key)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise UserError(f"{self.header.path}: the GGUF key {key!r} is missing or not a text")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 27) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, list):
            raise self.refuse(f"a value per layer for {key.lstrip('.')!r}")
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.bad_value(key, value)
        return value

    def number(self, key: str, default: float | None = None, *, low: float, high: float) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or not low <= value <= high:
            raise self.bad_value(key, value)
        return float(value)

    def bad_value(self, key: str, value: Any) -> UserError:
        """The error for an impossible value."""
        name = self.arch + key if key.startswith(".") else key
        what = "is missing" if value is None else f"has the bad value {shortened(repr(value))}"
        return UserError(f"{self.header.path}: the GGUF key {name!r} {what}")


def hf_config(meta: Metadata, rope_freqs: list[float] | None) -> dict[str, Any]:
    """Keyword arguments for the family's transformers config class."""
    for key in _REFUSED_KEYS:
        if meta.get("." + key):
            raise meta.refuse(f"{meta.arch} models with {key!r}")
    hidden, num_heads = meta.integer(".embedding_length"), meta.integer(".attention.head_count", high=1 << 16)
    head_dim = meta.integer(".attention.key_length", max(hidden // num_heads, 1), high=1 << 16)
    for key in (".attention.value_length", ".rope.dimension_count"):
        if meta.integer(key, head_dim) != head_dim:
            raise meta.refuse(f"{key.lstrip('.')!r} other than the head dimension {head_dim}")
    if head_dim % 2:
        raise meta.bad_value(".attention.key_length", head_dim)
    embedding = meta.header.tensors.get("token_embd.weight")
    return {
        "architectures": [FAMILIES[meta.arch]],
        "vocab_size": embedding.shape[0] if embedding else 0,
        "hidden_size": hidden,
        "intermediate_size": meta.integer(".feed_forward_length"),
        "num_hidden_layers": meta.integer(".block_count", high=4096),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.integer(".attention.head_count_kv", num_heads, high=1 << 16),
        "head_dim": head_dim,
        "max_position_embeddings": meta.integer(".context_length"),
        "rms_norm_eps": meta.number(".attention.layer_norm_rms_epsilon", low=1e-12, high=0.1),
        "rope_parameters": _rope_parameters(meta, head_dim, rope_freqs),
        "tie_word_embeddings": "output.weight" not in meta.header.tensors,
    }


def _rope_parameters(meta: Metadata, head_dim: int, rope_freqs: list[float] | None) -> dict[str, Any]:
    theta = meta.number(".rope.freq_base", 10000.0, low=1.0, high=1e12)
    # As in llama.cpp: a factor without a type is linear, and `scale_linear` is the factor's old name.
    kind = meta.text(".rope.scaling.type", "linear")
    old_factor = meta.number(".rope.scale_linear", 1.0, low=1e-3, high=1e6)
    factor = meta.number(".rope.scaling.factor", old_factor, low=1e-3, high=1e6)
    if kind == "none" or (kind == "linear" and factor == 1):
        kind = "default"
    if rope_freqs is not None and any(abs(value - 1) > 1e-6 for value in rope_freqs):
        if kind != "default":
            raise meta.refuse(f"{ROPE_FREQS} together with {kind!r} rope scaling")
        return _llama3_rope(meta, theta, head_dim, rope_freqs)
    if kind == "yarn":
        return _yarn_rope(meta, theta, factor)
    if kind == "linear":
        return {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind != "default":
        raise meta.refuse(f"{kind!r} rope scaling")
    return {"rope_type": kind, "rope_theta": theta}


def _yarn_rope(meta: Metadata, theta: float, factor: float) -> dict[str, Any]:
    prefix = ".rope.scaling."
    if meta.number(prefix + "yarn_ext_factor", 1.0, low=-1e6, high=1e6) != 1:
        raise meta.refuse("a yarn_ext_factor other than 1")
    if meta.number(prefix + "yarn_log_multiplier", 0.0, low=-1e6, high=1e6) != 0:
        raise meta.refuse("a yarn_log_multiplier")
    parameters: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": meta.integer(
            prefix + "original_context_length", meta.integer(".context_length")
        ),
        "beta_fast": meta.number(prefix + "yarn_beta_fast", 32.0, low=1e-3, high=1e6),
        "beta_slow": meta.number(prefix + "yarn_beta_slow", 1.0, low=1e-3, high=1e6),
    }
    # GGUF multiplies yarn's own attention factor where Hugging Face replaces it.
    attn_key = prefix + ("yarn_attn_factor" if meta.get(prefix + "yarn_attn_factor") else "attn_factor")
    attn_factor = meta.number(attn_key, 1.0, low=1e-3, high=1e3)
    if attn_factor != 1:
        parameters["attention_factor"] = attn_factor * (0.1 * math.log(factor) + 1.0)
    return parameters


def _llama3_rope(meta: Metadata, theta: float, head_dim: int, rope_freqs: list[float]) -> dict[str, Any]:
    """Recover the parameters of Llama 3.1's scaling; GGUF has only the resulting divisor of each frequency.

    All published models have the same low and high factor and original length. A file with other divisors is
    refused, because it would run with slightly wrong frequencies.
    """
    factor, low, high = max(rope_freqs), 1.0, 4.0
    original = meta.integer(".rope.scaling.original_context_length", 8192)
    expected = []
    for pair in range(head_dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * pair / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / factor + smooth))
    close = all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(rope_freqs, expected, strict=False))
    if len(rope_freqs) != len(expected) or not close:
        raise meta.refuse(f"the rope frequencies in {ROPE_FREQS}: they are not Llama 3.1's scaling")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": round(factor, 4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def special_ids(meta: Metadata, vocab_size: int) -> dict[str, Any]:
    """bos, pad and every id that ends an answer, with the names of `generation_config.json`."""

    def token_id(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        return None if meta.get(key) is None else meta.integer(key, low=0, high=vocab_size - 1)

    eos = [found for name in ("eos", "eot", "eom") if (found := token_id(name)) is not None]
    tokens, kinds = meta.get("tokenizer.ggml.tokens") or [], meta.get("tokenizer.ggml.token_type") or []
    eos += [
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == 3 and token in _END_OF_TURN  # 3: a control token
    ]
    ids = {"bos_token_id": token_id("bos"), "pad_token_id": token_id("padding")}
    unique = list(dict.fromkeys(eos))
    return {key: value for key, value in ids.items() if value is not None} | {"eos_token_id": unique or None}


def weight_plan(meta: Metadata, config: dict[str, Any]) -> list[Weight]:
    """Every weight of the model, checked against the file: none is missing, misshapen or left over."""
    tensors = meta.header.tensors
    embed = (config["vocab_size"], config["hidden_size"])
    plan = [
        Weight("token_embd.weight", "model.embed_tokens.weight", embed),
        Weight("output_norm.weight", "model.norm.weight", embed[1:]),
    ]
    if not config["tie_word_embeddings"]:
        plan.append(Weight("output.weight", "lm_head.weight", embed))
    for layer in range(config["num_hidden_layers"]):
        if f"blk.{layer}.attn_q.weight" not in tensors:
            raise UserError(f"{meta.header.path}: tensor 'blk.{layer}.attn_q.weight' is missing")
        plan += _layer_weights(meta.arch, config, layer)
    for weight in plan:
        if weight.gguf_name not in tensors:
            raise UserError(f"{meta.header.path}: tensor {weight.gguf_name!r} is missing")
        shape = tensors[weight.gguf_name].shape
        if shape != weight.shape:
            raise UserError(
                f"{meta.header.path}: tensor {weight.gguf_name!r} has the shape {list(shape)}"
                f", but the metadata says {list(weight.shape)}"
            )
    left_over = tensors.keys() - {weight.gguf_name for weight in plan} - {ROPE_FREQS}
    if left_over:
        raise meta.refuse(f"{meta.arch} models with a tensor {min(left_over)!r}")
    return plan


def _layer_weights(arch: str, config: dict[str, Any], layer: int) -> list[Weight]:
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q_dim, kv_dim = heads * head_dim, kv_heads * head_dim
    # llama.cpp rotates neighbouring pairs, so its Llama files have q and k rows reordered; Qwen files do not.
    q_order, k_order = (heads, kv_heads) if arch == "llama" else (0, 0)
    rows: list[tuple[str, str, tuple[int, ...], int]] = [
        ("attn_norm.weight", "input_layernorm.weight", (hidden,), 0),
        ("attn_q.weight", "self_attn.q_proj.weight", (q_dim, hidden), q_order),
        ("attn_k.weight", "self_attn.k_proj.weight", (kv_dim, hidden), k_order),
        ("attn_v.weight", "self_attn.v_proj.weight", (kv_dim, hidden), 0),
        ("attn_output.weight", "self_attn.o_proj.weight", (hidden, q_dim), 0),
        ("ffn_norm.weight", "post_attention_layernorm.weight", (hidden,), 0),
        ("ffn_gate.weight", "mlp.gate_proj.weight", (ffn, hidden), 0),
        ("ffn_up.weight", "mlp.up_proj.weight", (ffn, hidden), 0),
        ("ffn_down.weight", "mlp.down_proj.weight", (hidden, ffn), 0),
    ]
    if arch == "qwen2":
        rows += [
            ("attn_q.bias", "self_attn.q_proj.bias", (q_dim,), 0),
            ("attn_k.bias", "self_attn.k_proj.bias", (kv_dim,), 0),
            ("attn_v.bias", "self_attn.v_proj.bias", (kv_dim,), 0),
        ]
    if arch == "qwen3":
        rows += [
            ("attn_q_norm.weight", "self_attn.q_norm.weight", (head_dim,), 0),
            ("attn_k_norm.weight", "self_attn.k_norm.weight", (head_dim,), 0),
        ]
    return [Weight(f"blk.{layer}.{g}", f"model.layers.{layer}.{h}", shape, n) for g, h, shape, n in rows]
