"""What a vanilla step and a speculative round cost, by context and batch, with random weights and KV.

Tokens that random weights draft are hardly ever accepted; what a round costs does not depend on that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longspec.bench.clock import now
from longspec.bench.shapes import random_target, shape_named
from longspec.config import DraftConfig, ModelConfig
from longspec.decoding.choose import Sampling
from longspec.decoding.device import DeviceRounds
from longspec.decoding.loop import DecodeState, Method, start
from longspec.decoding.methods.glide import Glide
from longspec.decoding.methods.vanilla import Vanilla
from longspec.decoding.row import Row
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.placement import pick_device, pick_dtype
from longspec.models.target import Transformer


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    shape: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    tree_shape: tuple[int, ...]
    max_nodes: int | None
    draft: DraftConfig
    sampling: Sampling
    rounds: int = 40


@dataclass(frozen=True)
class Latency:
    """One line: times in milliseconds."""

    context: int
    batch: int
    nodes: int
    vanilla: float
    """A vanilla step."""
    tree: float
    """A round: drafting, verifying, accepting, committing."""
    ratio: float
    floor: float
    """Reading the weights and the KV once, at the bandwidth of a large copy."""
    share: float
    """Of the floor's speed that vanilla reaches."""
    tokens_per_second: float
    """Vanilla's, all rows together."""
    draft_kv_bytes: int
    peak_memory: int


def measure_latency(setting: Setting, device_name: str = "auto") -> list[Latency]:
    """Every context with every batch, vanilla and tree by turns."""
    device = pick_device(device_name)
    dtype = pick_dtype("auto", device)
    config = shape_named(setting.shape)
    target = random_target(config, device, dtype)
    draft = GlideDraft(config, setting.draft)
    draft.initialise(torch.Generator().manual_seed(0))
    if draft.vocab_ids is not None:
        draft.vocab_ids.copy_(torch.arange(len(draft.vocab_ids)))
    draft.requires_grad_(False).to(device=device, dtype=dtype)
    head = DraftHead(target, draft.vocab_ids)
    bandwidth = copy_bandwidth(device)
    lines = []
    for context in setting.contexts:
        for batch in setting.batches:
            tree = Glide(draft, head, setting.tree_shape, setting.max_nodes, draws=False, name="tree")
            lines.append(_line(target, tree, context, batch, setting, bandwidth))
    return lines


def _line(
    target: Transformer, tree: Glide, context: int, batch: int, setting: Setting, bandwidth: float
) -> Latency:
    device, config = target.device, target.config
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    width = len(setting.tree_shape) + 1
    capacity = context + 4 * setting.rounds * width + tree.num_nodes
    cache = target.new_cache(batch, capacity)
    generator = torch.Generator(device).manual_seed(0)
    for layer in range(config.num_layers):
        for buffer in cache.layer(layer):
            buffer.normal_(generator=generator)
    times = {}
    methods: dict[str, Method] = {"vanilla": Vanilla(), "tree": tree}
    for name, method in methods.items():
        rows = [Row([1] * context, row, capacity) for row in range(batch)]
        state = start(target, cache, rows, setting.sampling)
        cache.lengths.fill_(context)
        target.rope.reserve(capacity)
        times[name] = 1e3 * _time(state, method, setting.rounds)
    floor = 1e3 * read_bytes(config, target.dtype, context, batch) / bandwidth
    assert tree.ring is not None
    return Latency(
        context,
        batch,
        tree.num_nodes,
        times["vanilla"],
        times["tree"],
        times["tree"] / times["vanilla"],
        floor,
        floor / times["vanilla"],
        1e3 * batch / times["vanilla"],
        tree.ring.num_bytes,
        torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
    )


def _time(state: DecodeState, method: Method, count: int) -> float:
    """Seconds a round, the host's reading included."""
    with torch.inference_mode():
        rounds = DeviceRounds(state, method).run(state)
        for _ in range(5):
            next(rounds)
        started = time.perf_counter()
        for _ in range(count):
            next(rounds)
        return (time.perf_counter() - started) / count


def read_bytes(config: ModelConfig, dtype: torch.dtype, context: int, batch: int) -> int:
    """What a step must read: every weight but the embedding's other rows, and the rows' keys and values."""
    unread = 0 if config.tied_head else config.vocab_size * config.hidden_size
    kv = batch * context * config.kv_bytes_per_token(dtype.itemsize)
    return (config.num_parameters - unread) * dtype.itemsize + kv


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    best = 0.0
    for _ in range(6):
        started = now(device)
        goal.copy_(source)
        best = max(best, 2 * size / (now(device) - started))
    return best


def table(lines: Sequence[Latency]) -> str:
    """For people, as markdown."""
    rows = [
        "| context | batch | nodes | vanilla ms | tokens/s | share of the floor | round ms | round / step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {one.context:,} | {one.batch} | {one.nodes} | {one.vanilla:.3f} | {one.tokens_per_second:,.0f} | "
        f"{one.share:.2f} | {one.tree:.3f} | {one.ratio:.2f} |"
        for one in lines
    ]
    return "\n".join(rows)
