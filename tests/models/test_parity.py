"""Our one Transformer against `transformers`, fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from longspec import LongSpec
from longspec.cache import Pages
from longspec.models.draft import DraftHead
from longspec.models.families import config_from_hf
from longspec.models.load import load_target
from longspec.models.target import Transformer
from tests.decoding.scripted import pass_over

TINY: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope(theta: float = 10000.0, **values: Any) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": "default"} | values


MODELS: dict[str, tuple[type[PreTrainedModel], PretrainedConfig]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=rope(500000.0))),
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**TINY, tie_word_embeddings=True)),
    "llama-mha-head-dim": (
        LlamaForCausalLM,
        LlamaConfig(**(TINY | {"num_key_value_heads": 6}), head_dim=16, rms_norm_eps=1e-3),
    ),
    "llama-bias": (LlamaForCausalLM, LlamaConfig(**TINY, attention_bias=True)),
    "llama-linear": (
        LlamaForCausalLM,
        LlamaConfig(**TINY, rope_parameters=rope(rope_type="linear", factor=4.0)),
    ),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=rope(**LLAMA3))),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=rope(**YARN))),
    "llama-yarn-mscale": (
        LlamaForCausalLM,
        LlamaConfig(
            **TINY,
            rope_parameters=rope(**YARN, mscale=0.8, mscale_all_dim=1.2, beta_fast=16.0, truncate=False),
        ),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**TINY, rope_parameters=rope(1000000.0))),
    "qwen2-yarn": (Qwen2ForCausalLM, Qwen2Config(**TINY, rope_parameters=rope(**YARN, attention_factor=1.3))),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**TINY, head_dim=32, tie_word_embeddings=True)),
    "mistral": (
        MistralForCausalLM,
        MistralConfig(**TINY, head_dim=16, sliding_window=None, rope_parameters=rope(1000000.0)),
    ),
}


def random_pair(name: str) -> tuple[Any, Transformer]:
    """A random model of `transformers` and ours with the same weights; biases and norms are not trivial."""
    torch.manual_seed(len(name))
    kind, config = MODELS[name]
    theirs = kind(config).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    weights = theirs.state_dict()
    ours = load_target(config_from_hf(config), weights.__getitem__, torch.device("cpu"), torch.float32)
    return theirs, ours


def paged(ours: Transformer, rows: int) -> tuple[Pages, torch.Tensor]:
    """Room for 256 tokens of each row, in pages in random order."""
    pages = Pages.empty(ours.config, rows * 16, 16, ours.device, ours.dtype)
    return pages, (torch.randperm(rows * 16) + 1).int().view(rows, 16)


def over(
    ours: Transformer,
    pages: Pages,
    tables: torch.Tensor,
    lengths: list[int],
    tokens: torch.Tensor,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    return pass_over(ours, pages, tables, torch.tensor(lengths), tokens, tree)


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
def test_logits_match(name: str) -> None:
    theirs, ours = random_pair(name)
    tokens = torch.randint(TINY["vocab_size"], (1, 200))
    expected = theirs(tokens).logits
    assert expected.std() > 0.3, "flat logits would match anything"

    pages, tables = paged(ours, 1)
    torch.testing.assert_close(
        ours.logits(over(ours, pages, tables, [0], tokens)), expected, atol=1e-4, rtol=0
    )

    # in chunks, then token by token, as decoding does
    parts, done = [], 0
    pages, tables = paged(ours, 1)
    for piece in (*tokens[:, :150].split(64, 1), *tokens[:, 150:].split(1, 1)):
        parts.append(ours.logits(over(ours, pages, tables, [done], piece)))
        done += piece.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=0)
    assert ours.config.num_parameters == sum(weight.numel() for weight in theirs.parameters())


@torch.inference_mode()
def test_a_tree_gives_each_path_its_own_logits() -> None:
    theirs, ours = random_pair("qwen3")
    prefixes = torch.randint(TINY["vocab_size"], (2, 40))
    lengths = (40, 23)
    parents = [-1, 0, 0, 1, 1, 2, 5]
    nodes = torch.randint(TINY["vocab_size"], (2, len(parents)))
    tree = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        tree[node] |= tree[parent]
    pages, tables = paged(ours, 2)
    for row, length in enumerate(lengths):
        over(ours, pages, tables[row : row + 1], [0], prefixes[row : row + 1, :length])
    logits = ours.logits(over(ours, pages, tables, list(lengths), nodes, tree))
    for row, length in enumerate(lengths):
        for node in range(len(parents)):
            path = nodes[row, tree[node]]
            expected = theirs(torch.cat((prefixes[row, :length], path))[None]).logits[0, -1]
            torch.testing.assert_close(logits[row, node], expected, atol=1e-4, rtol=0)

    # and after committing a path the next token is as if nothing else had been there
    path = torch.tensor([[0, 2, 5, 6], [0, 1, 4, 4]])
    pages.commit(tables, torch.tensor(lengths), path, torch.tensor([4, 3]))
    following = torch.tensor([[7], [8]])
    logits = ours.logits(over(ours, pages, tables, [44, 26], following))
    for row, kept in enumerate((4, 3)):
        text = torch.cat((prefixes[row, : lengths[row]], nodes[row, path[row, :kept]], following[row]))
        torch.testing.assert_close(logits[row, 0], theirs(text[None]).logits[0, -1], atol=1e-4, rtol=0)


PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Write a Python function that reverses a list without using slicing.",
    "Explain in simple words why the sea is salty.",
    "Translate into German: The weather is fine today, let us go for a walk.",
    "List five uses of a paper clip.",
]


@torch.inference_mode()
def test_smollm2_says_what_transformers_makes_it_say(smollm2: LongSpec, smollm2_folder: Any) -> None:
    theirs = LlamaForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    for prompt in PROMPTS:
        ours = smollm2.generate(prompt, max_new_tokens=12, temperature=0)
        chat = [{"role": "user", "content": prompt}]
        ids = smollm2.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        expected = theirs.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
        assert ours.token_ids == expected
        assert len(expected) > 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_half_precision_weights_are_fp32(dtype: torch.dtype) -> None:
    _, ours = random_pair("llama")
    config = ours.config
    torch.manual_seed(0)
    ours = Transformer(config).to(dtype)
    torch.nn.init.normal_(ours.head.weight)
    draft_head = DraftHead(ours, torch.arange(0, config.vocab_size, 3))
    for shape in ((1,), (2, 3)):
        hidden = torch.randn(*shape, config.hidden_size).to(dtype)
        exact = hidden.double() @ ours.head.weight.double().T
        torch.testing.assert_close(ours.logits(hidden).double(), exact, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(draft_head(hidden).double(), exact[..., ::3], atol=1e-4, rtol=1e-5)
