"""How fast a draft trains on this machine, beside what its arithmetic allows, with random weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.shapes import random_target, shape_named
from longspec.bench.environment import now
from longspec.config import DraftConfig, ModelConfig
from longspec.data.collate import collate
from longspec.data.shards import Packed, Role
from longspec.models.draft import GlideDraft
from longspec.models.placement import pick_dtype
from longspec.train.compiled import compile_layers
from longspec.train.engine import TrainingEngine, join, local_device
from longspec.train.layout import Draws, Layout, head_rows, lay_out
from longspec.train.losses import LossShares, one_chunk
from longspec.train.objective import Objective
from longspec.train.schema import StageSettings


@dataclass(frozen=True)
class TrainingSpeed:
    """One measurement."""

    shape: str
    seq_length: int
    micro_batch: int
    seconds_per_step: float
    tokens_per_second: float
    flops_per_token: float
    matmul_flops: float
    """What a large product of matrices reaches here, per second."""
    floor_tokens_per_second: float
    """What `flops_per_token` would allow at that rate."""
    peak_memory: int
    parameters: int
    """Of the draft."""


def measure_training(
    shape: str,
    seq_length: int,
    micro_batch: int,
    draft: DraftConfig,
    soft: float = 0.0,
    compile: bool = False,
    prompt_share: float = 0.0,
    num_steps: int = 10,
    device_name: str = "auto",
) -> TrainingSpeed:
    """Time optimizer steps of the real training path after a warm-up."""
    config = shape_named(shape)
    device = local_device(device_name)
    dtype = pick_dtype("auto", device)
    target = random_target(config, device, dtype)
    model = GlideDraft(config, draft)
    model.initialise(torch.Generator().manual_seed(0))
    model.to(device=device, dtype=dtype)
    processes = join(device)
    stage = StageSettings(micro_batch=micro_batch)
    settings = {"zero_optimization": {"stage": 1}}
    engine = TrainingEngine(target, model, settings, stage, processes, device)
    chunk = compile_layers(target, model) if compile else one_chunk
    objective = Objective(
        target, model, LossShares(soft), 1.0, engine.run_target, engine.draft, engine.gather, chunk=chunk
    )
    layouts = [
        _layout(config, draft, seq_length, micro_batch, prompt_share, seed, device) for seed in range(4)
    ]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(3 if not compile else 5):
        _step(objective, engine, layouts[step % 4])
    started = now(device)
    for step in range(num_steps):
        _step(objective, engine, layouts[step % 4])
    seconds = (now(device) - started) / num_steps
    tokens = seq_length * micro_batch
    flops = flops_per_token(config, model, seq_length, soft, prompt_share)
    rate = matmul_rate(device, dtype)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    parameters = sum(weight.numel() for weight in model.parameters())
    return TrainingSpeed(
        shape, seq_length, micro_batch, seconds, tokens / seconds, flops, rate, rate / flops, peak, parameters
    )


def report(speed: TrainingSpeed) -> str:
    """The measurement for people."""
    share = speed.tokens_per_second / speed.floor_tokens_per_second
    gflop, tflops = speed.flops_per_token / 1e9, speed.matmul_flops / 1e12
    lines = [
        f"{speed.shape}, {speed.micro_batch} x {speed.seq_length:,} tokens, "
        f"a draft of {speed.parameters / 1e6:.1f}M parameters",
        f"{speed.tokens_per_second:,.0f} tokens/s ({1e3 * speed.seconds_per_step:.1f} ms a step)",
        f"{share:.0%} of the {speed.floor_tokens_per_second:,.0f} tokens/s that {gflop:.2f} GFLOP a token "
        f"allow at the {tflops:.1f} TFLOP/s of large matrix products here",
    ]
    if speed.peak_memory:
        lines.append(f"{speed.peak_memory / 1e9:.1f} GB of memory at the peak")
    return "\n".join(lines)


def _step(objective: Objective, engine: TrainingEngine, layout: Layout) -> None:
    outcome = objective(layout)
    engine.backward(outcome.loss / sum(level.num_counted for level in layout.levels))
    engine.step(1e-4)


def _layout(
    config: ModelConfig,
    draft: DraftConfig,
    length: int,
    rows: int,
    prompt_share: float,
    seed: int,
    device: torch.device,
) -> Layout:
    chance = np.random.default_rng(seed)
    whole = np.zeros(1, np.int32)
    roles = np.full(length, Role.TEXT, np.uint8)
    roles[: round(length * prompt_share)] = Role.PROMPT
    size = draft.draft_vocab or config.vocab_size  # the draft can propose nearly all tokens of real text
    batch = [Packed(chance.integers(0, size, length), roles, whole) for _ in range(rows)]
    draws = Draws(
        draft.max_lag, draft.window, max_offset=config.max_length - length, all_lags=draft.use_parent
    )
    of_rows, offsets = zip(*(draws.lags_and_offset(seed, row) for row in range(rows)), strict=True)
    ids = torch.arange(draft.draft_vocab) if draft.draft_vocab else None
    rows_of = head_rows(ids, config.vocab_size)
    lags = list(zip(*of_rows, strict=True))
    return lay_out(collate(batch, "long", True), lags, offsets, 4, rows_of, device)


def flops_per_token(
    config: ModelConfig, draft: GlideDraft, length: int, soft: float, prompt_share: float
) -> float:
    """Multiplications and additions of one token: the target forward, the draft and its head both ways."""
    blocks = config.num_parameters - config.vocab_size * config.hidden_size * (1 if config.tied_head else 2)
    pair = 4 * config.num_heads * config.head_dim  # one query over one key, scores and values
    causal = pair * length / 2
    target = 2 * blocks + config.num_layers * causal
    layer = 6 * sum(weight.numel() for weight in draft.parameters())
    head = 2 * (draft.config.draft_vocab or config.vocab_size) * config.hidden_size
    # The backward pass of attention costs 2.5 times its forward pass. Each level has two products with the
    # head: one for the scores, one for the gradient.
    own = 3.5 * pair * min(draft.config.window, length / 2)
    level = layer + 3.5 * draft.num_cross * causal + 2 * head
    num_levels = draft.config.max_lag if draft.config.use_parent else 1
    # The target's scores, if it teaches, are the same at every level.
    return target + own + (1 - prompt_share) * (num_levels * level + (head if soft else 0))


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """What this device reaches on large square matrices, in operations per second."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    started = now(device)
    for _ in range(10):
        a @ b
    return 10 * 2 * size**3 / (now(device) - started)
