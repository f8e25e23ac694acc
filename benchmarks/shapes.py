"""Targets and drafts by shape alone, with random weights, to measure time and memory without a download."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from longspec.cache import Pages
from longspec.config import DraftConfig, ModelConfig, RopeConfig
from longspec.engine.load import prepare_draft
from longspec.errors import UserError
from longspec.models.checkpoint import WeightFiles
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.files import read_config
from longspec.models.load import load_target
from longspec.models.target import Transformer

SHAPES: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_length=8192,
        rms_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        tied_head=True,
    ),
    "qwen2.5-0.5b": ModelConfig(
        family="qwen2",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        max_length=32768,
        rms_eps=1e-6,
        rope=RopeConfig(theta=1000000.0),
        qkv_bias=True,
        tied_head=True,
    ),
    "llama3-8b": ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_length=262144,
        rms_eps=1e-5,
        rope=RopeConfig(theta=283461213.0),
    ),
    "tiny": ModelConfig(
        family="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_length=2048,
    ),
}


def shape_named(name: str) -> ModelConfig:
    """A shape of the table."""
    if name not in SHAPES:
        raise UserError(f"shape {name!r} is unknown; there are: {', '.join(SHAPES)}")
    return SHAPES[name]


def write_random_pair(
    folder: Path, tokenizer: Path, config: Qwen2Config, draft_config: DraftConfig, std: float = 0.02
) -> tuple[Path, Path]:
    """A random target of this config with a real tokenizer, and a draft for it, each written to a folder."""
    torch.manual_seed(1)
    Qwen2ForCausalLM(config).save_pretrained(folder / "target")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder / "target")
    shape = read_config(folder / "target")
    with WeightFiles(folder / "target") as weights:
        target = load_target(shape, weights.tensor, torch.device("cpu"), torch.float32, packed=False)
    draft = GlideDraft(shape, draft_config)
    draft.initialise(torch.Generator().manual_seed(2), std)
    draft.save_pretrained(folder / "draft", target, "random")
    return folder / "target", folder / "draft"


def random_target(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Transformer:
    """A frozen target of this shape, its weights drawn where they stay."""
    with torch.device("meta"):
        target = Transformer(config)
    target.to(dtype).to_empty(device=device)
    if config.tied_head:
        target.head.weight = target.embedding
    generator = torch.Generator(device).manual_seed(seed)
    for weight in target.parameters():
        if weight.ndim == 1:
            nn.init.ones_(weight)
        else:
            nn.init.normal_(weight, std=0.02, generator=generator)
    return target.requires_grad_(False).eval()


def random_draft(
    target: Transformer, config: DraftConfig, draft_dtype: str = "auto"
) -> tuple[GlideDraft, DraftHead]:
    """A draft for this target, ready for decoding, and its part of the target's head."""
    draft = GlideDraft(target.config, config)
    draft.initialise(torch.Generator().manual_seed(0))
    return prepare_draft(draft.to(device=target.device, dtype=target.dtype), target, draft_dtype)


@torch.inference_mode()
def fill_pages(pages: Pages, seed: int = 0) -> None:
    """Random KV in every page."""
    generator = torch.Generator(pages.keys.device).manual_seed(seed)
    for part in (pages.keys, pages.values):
        for layer in part:
            # torch draws no fp8.
            like = torch.empty(layer.shape, device=layer.device, dtype=torch.bfloat16)
            layer.copy_(like.normal_(generator=generator))
