"""Tiny GGUF files, written with the gguf package, and the weights they stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers.convert_slow_tokenizer import bytes_to_unicode

Array = np.ndarray[Any, Any]

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 256, 4, 2, 64, 2
BYTES: dict[int, str] = bytes_to_unicode()
BYTE_TOKENS = [*BYTES.values(), "hi", "Ġhi", "<|bos|>", "<|end|>", "<|eot_id|>"]
BYTE_KINDS = [1] * 258 + [3, 3, 3]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "h", "i", "▁h", "▁hi"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"

# Bytes at which the float16 scales of a block begin: random bits there would be inf or nan.
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def encode(values: Array, kind: str) -> tuple[Array, Array]:
    """`values` in a GGUF type: the stored bytes, and the float32 numbers they mean."""
    qtype = GGMLQuantizationType[kind]
    if kind in _SCALES:  # the gguf package cannot make these: any bytes with sane scales are a valid block
        block, block_bytes = GGML_QUANT_SIZES[qtype]
        rng = np.random.default_rng(values.shape[0])
        shape = (*values.shape[:-1], values.shape[-1] // block, block_bytes)
        blocks = rng.integers(0, 256, shape, dtype=np.uint8)
        scale = np.frombuffer(np.float16(0.001).tobytes(), dtype=np.uint8)
        for start in _SCALES[kind]:
            blocks[..., start : start + 2] = scale
        data = blocks.reshape(*values.shape[:-1], -1)
    else:
        data = gguf.quants.quantize(values, qtype)
    return data, gguf.quants.dequantize(data, qtype).reshape(values.shape)


def permute(weight: Array, num_heads: int) -> Array:
    """Rows in llama.cpp's rotary order, as its converter writes them for Llama."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def unpermute(weight: Array, num_heads: int) -> Array:
    return (
        weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def tensor_shapes(arch: str, tied: bool, vocab: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, HIDDEN)),
        "output_norm.weight": ("model.norm.weight", (HIDDEN,)),
    }
    if not tied:
        shapes["output.weight"] = ("lm_head.weight", (vocab, HIDDEN))
    for layer in range(LAYERS):
        rows: dict[str, tuple[str, tuple[int, ...]]] = {
            "attn_norm.weight": ("input_layernorm.weight", (HIDDEN,)),
            "attn_q.weight": ("self_attn.q_proj.weight", (q, HIDDEN)),
            "attn_k.weight": ("self_attn.k_proj.weight", (kv, HIDDEN)),
            "attn_v.weight": ("self_attn.v_proj.weight", (kv, HIDDEN)),
            "attn_output.weight": ("self_attn.o_proj.weight", (HIDDEN, q)),
            "ffn_norm.weight": ("post_attention_layernorm.weight", (HIDDEN,)),
            "ffn_gate.weight": ("mlp.gate_proj.weight", (FFN, HIDDEN)),
            "ffn_up.weight": ("mlp.up_proj.weight", (FFN, HIDDEN)),
            "ffn_down.weight": ("mlp.down_proj.weight", (HIDDEN, FFN)),
        }
        if arch == "qwen2":
            rows |= {f"attn_{n}.bias": (f"self_attn.{n}_proj.bias", (q if n == "q" else kv,)) for n in "qkv"}
        if arch == "qwen3":
            rows |= {f"attn_{n}_norm.weight": (f"self_attn.{n}_norm.weight", (HEAD_DIM,)) for n in "qk"}
        shapes |= {f"blk.{layer}.{g}": (f"model.layers.{layer}.{h}", s) for g, (h, s) in rows.items()}
    return shapes


def write_gguf(
    path: Path,
    arch: str = "llama",
    kind: str = "F32",
    *,
    tied: bool = True,
    tokenizer: str = "gpt2",
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> dict[str, Array]:
    """Write a tiny model; returns the weights it means, under Hugging Face names and in their row order."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(512)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_license("apache-2.0")
    _add_tokenizer(writer, arch, tokenizer)
    if extra is not None:
        extra(writer)
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {}
    vocab = len(BYTE_TOKENS if tokenizer == "gpt2" else SPM_TOKENS)
    for name, (hf_name, shape) in tensor_shapes(arch, tied, vocab).items():
        values = rng.normal(size=shape).astype(np.float32) * 0.05 + (1.0 if "norm" in name else 0.0)
        heads = {"attn_q.weight": HEADS, "attn_k.weight": KV_HEADS}.get(name.split(".", 2)[-1], 0)
        heads = heads if arch == "llama" else 0
        stored = permute(values, heads) if heads else values
        data, meaning = encode(stored, kind if len(shape) == 2 else "F32")
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind if len(shape) == 2 else "F32"])
        weights[hf_name] = unpermute(meaning, heads) if heads else meaning
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _add_tokenizer(writer: gguf.GGUFWriter, arch: str, tokenizer: str) -> None:
    writer.add_tokenizer_model(tokenizer)
    writer.add_chat_template(CHAT_TEMPLATE)
    if tokenizer == "llama":
        writer.add_token_list(SPM_TOKENS)
        writer.add_token_scores([0.0] * 259 + [-1000.0, -1001.0, -1002.0, -1.0, -2.0])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        return
    writer.add_tokenizer_pre("llama-bpe" if arch == "llama" else "qwen2")
    writer.add_token_list(BYTE_TOKENS)
    writer.add_token_types(BYTE_KINDS)
    writer.add_token_merges(["h i", "Ġ hi"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    writer.add_add_bos_token(arch == "llama")
