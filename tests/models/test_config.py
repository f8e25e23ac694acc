"""What a config says, in old and new spelling, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from longspec.config import RopeConfig
from longspec.errors import UserError
from longspec.models.families import config_from_hf

RAW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def test_old_and_new_spellings_agree() -> None:
    old = config_from_hf(RAW | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = config_from_hf(RAW | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})
    assert old == new
    assert new.rope == RopeConfig(theta=5e5, kind="linear", factor=2.0, original_length=4096)
    through_transformers = LlamaConfig(
        **RAW | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    )
    assert config_from_hf(through_transformers) == new


def test_the_context_is_what_scaling_makes_of_it() -> None:
    def limit(positions: int, **scaling: Any) -> int:
        return config_from_hf(
            RAW | {"max_position_embeddings": positions, "rope_scaling": scaling}
        ).max_length

    # Vicuna 16k and LongChat 32k give the length before scaling, and so does Qwen2.5 with yarn.
    assert limit(4096, type="linear", factor=4.0) == 16384
    assert limit(4096, rope_type="yarn", factor=2.5) == 10240
    assert limit(32768, type="yarn", factor=4.0, original_max_position_embeddings=32768) == 131072
    # What is stretched already is not stretched again; Llama 3.1 always is.
    assert limit(131072, type="yarn", factor=4.0, original_max_position_embeddings=32768) == 131072
    assert limit(40960, type="yarn", factor=4.0, original_max_position_embeddings=32768) == 131072
    assert limit(131072, rope_type="llama3", factor=8.0, original_max_position_embeddings=8192) == 131072


def test_missing_kv_heads_and_head_dim_follow_the_heads() -> None:
    raw = {name: value for name, value in RAW.items() if name != "num_key_value_heads"}
    config = config_from_hf(raw)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": None}, "None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "0.5"),
        ({"num_attention_heads": 3}, "3 is not a multiple"),
        ({"vocab_size": "many"}, "'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 77}, "77"),
    ],
)
def test_what_would_run_wrongly_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        config_from_hf(RAW | change)


def test_a_sliding_window_counts_only_when_used() -> None:
    raw = RAW | {"model_type": "qwen2", "sliding_window": 128, "max_window_layers": 1}
    assert config_from_hf(raw | {"use_sliding_window": False}).qkv_bias
    with pytest.raises(UserError, match="128"):
        config_from_hf(raw | {"use_sliding_window": True})
    with pytest.raises(UserError, match="128"):
        config_from_hf(Qwen2Config(**raw | {"use_sliding_window": True}))


def test_mistral_is_run_without_a_window_and_refused_with_one() -> None:
    raw = RAW | {"model_type": "mistral", "sliding_window": None}
    assert config_from_hf(raw) == config_from_hf(MistralConfig(**raw))
    silent = {name: value for name, value in raw.items() if name != "sliding_window"}
    for windowed in (silent, raw | {"sliding_window": 4096}, MistralConfig(**silent)):
        with pytest.raises(UserError, match=r"sliding_window = 4096.*set sliding_window = null"):
            config_from_hf(windowed)
