"""What a vanilla step and a speculative round cost, by context and batch, with random weights and KV.

Tokens that random weights draft are hardly ever accepted; what a round costs does not depend on that.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from longspec.api import prepare_draft
from longspec.attention import choose_backend
from longspec.bench.bandwidth import copy_bandwidth
from longspec.bench.environment import PeakMemory
from longspec.bench.shapes import random_target, shape_named
from longspec.bench.summary import Spread
from longspec.calibration import Planner
from longspec.config import DEFAULT_TREE, DraftConfig, ModelConfig
from longspec.decoding.accept import accept_coupled
from longspec.decoding.auto import Plan
from longspec.decoding.choose import Sampling
from longspec.decoding.device import DeviceRounds, replays, width_of
from longspec.decoding.expected import gain
from longspec.decoding.loop import DecodeState, Method, host_rounds, start
from longspec.decoding.methods.glide import Glide
from longspec.decoding.methods.make import MethodOptions, make_method
from longspec.decoding.methods.vanilla import Vanilla
from longspec.decoding.row import Row
from longspec.decoding.timing import seconds_a_round
from longspec.errors import UserError
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.layers import pack_linears
from longspec.models.placement import (
    check_fits,
    draft_weights,
    free_memory,
    gigabytes,
    pick_device,
    pick_dtype,
)
from longspec.models.target import Transformer

# Rounds before the clock starts: kernels are compiled, and as many as may be in flight are.
_WARM_UP = 5
# Beside a cache there must be room for activations, logits and graphs.
_WORKING = 2**28


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    shape: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    tree_shape: tuple[int, ...] = DEFAULT_TREE
    max_nodes: int | None = None
    auto: bool = False
    """Whether the tree is the one that the plan of `auto` has for the context and batch."""
    draft: DraftConfig = field(default_factory=DraftConfig)
    sampling: Sampling | None = None
    """Measured beside greedy; None leaves it out."""
    rounds: int = 40
    repeats: int = 5
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    """auto is the backend that replays rounds: triton, on a GPU."""

    def __post_init__(self) -> None:
        for name in ("contexts", "batches"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise UserError(f"{name} are {list(values)}; give one or more, each at least 1")
        for name in ("rounds", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sampling is not None and (self.sampling.greedy or self.sampling.repetition_penalty != 1):
            raise UserError(f"{self.sampling} cannot be measured beside greedy; give a temperature above 0")
        MethodOptions("tree", tree_shape=self.tree_shape, max_nodes=self.max_nodes)  # refuses what is wrong


@dataclass(frozen=True)
class Mode:
    """Milliseconds over the repeats, and their ratio within each repeat."""

    step: Spread
    """A vanilla step."""
    round: Spread
    """A whole round: drafting, verifying, accepting, committing, the host's reading."""
    ratio: Spread


@dataclass(frozen=True)
class Latency:
    """One context and batch."""

    context: int
    batch: int
    tree_shape: tuple[int, ...]
    nodes: int
    """That are verified in a round, the root among them."""
    greedy: Mode
    sampled: Mode | None
    floor: float
    """Milliseconds to read the weights and the KV once, at the bandwidth of a large copy."""
    weights_bytes: int
    """Of the target."""
    kv_bytes: int
    """Of the target, for this context and batch."""
    draft_weights_bytes: int
    draft_kv_bytes: int
    """Of one row."""
    peak_memory: int
    """All that was taken from the device, with what graphs keep for themselves; of the process on a CPU."""

    @property
    def share(self) -> float:
        """Of the floor's speed that vanilla reaches."""
        return self.floor / self.greedy.step.median

    @property
    def beyond(self) -> int:
        """Memory at the peak beyond the target's weights and KV: the draft, graphs, activations, tables."""
        return self.peak_memory - self.weights_bytes - self.kv_bytes

    @property
    def sampling_costs(self) -> float | None:
        """How much longer a round takes when sampling: 0.1 is 10% longer."""
        return None if self.sampled is None else self.sampled.round.median / self.greedy.round.median - 1


@dataclass(frozen=True)
class Missing:
    """A context and batch that could not be measured."""

    context: int
    batch: int
    why: str


@dataclass(frozen=True)
class Latencies:
    """A whole run."""

    setting: Setting
    device: torch.device
    dtype: torch.dtype
    replays: bool
    """Whether rounds were captured and replayed."""
    bandwidth: float
    """Bytes per second of a large copy, read and written."""
    lines: list[Latency]
    missing: list[Missing]


class _NotMeasured(Exception):
    """Says why."""


def measure_latency(setting: Setting, on_line: Callable[[Latencies], None] = lambda run: None) -> Latencies:
    """Every context with every batch; `on_line` is told after each what there is so far."""
    device = pick_device(setting.device)
    dtype = pick_dtype(setting.dtype, device)
    config = shape_named(setting.shape)
    attention = choose_backend(setting.attention)
    check_fits(setting.shape, config, dtype, device)
    bandwidth = copy_bandwidth(device)
    target = random_target(config, device, dtype)
    target.attention = attention
    pack_linears(target)
    draft = GlideDraft(config, setting.draft)
    draft.initialise(torch.Generator().manual_seed(0))
    drafting = prepare_draft(draft.to(device=device, dtype=dtype), target)
    found = Latencies(setting, device, dtype, replays(target), bandwidth, [], [])
    plan = Planner(target, drafting, {}, max(setting.contexts) + 1, False)
    for context in setting.contexts:
        for batch in setting.batches:
            try:
                found.lines.append(_line(target, drafting, plan, context, batch, found))
            except (_NotMeasured, torch.OutOfMemoryError) as error:
                # The first line is enough: the allocator's advice goes on for many.
                found.missing.append(Missing(context, batch, str(error).partition("\n")[0]))
            on_line(found)
    return found


def _line(
    target: Transformer,
    drafting: tuple[GlideDraft, DraftHead],
    plan: Callable[[int], Plan],
    context: int,
    batch: int,
    run: Latencies,
) -> Latency:
    setting, config, device = run.setting, target.config, target.device
    tree = _tree(drafting, plan, context, batch, setting)
    _let_go(device)
    assert tree.tree_shape is not None
    capacity = context + (setting.rounds + _WARM_UP + 3) * width_of(tree) + tree.num_nodes
    per_token = config.kv_bytes_per_token(target.dtype.itemsize)
    if (needed := batch * capacity * per_token) + _WORKING > (free := free_memory(device)):
        raise _NotMeasured(
            f"does not fit: the KV takes {gigabytes(needed)} and {gigabytes(free)} are free on {device}; "
            "a smaller context or batch would"
        )
    memory = PeakMemory(device)
    modes = _times(target, tree, context, batch, capacity, setting, run.replays)
    assert tree.ring is not None
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else memory.peak
    return Latency(
        context,
        batch,
        tree.tree_shape,
        tree.num_nodes,
        modes[0],
        modes[1] if len(modes) > 1 else None,
        1e3 * read_bytes(config, target.dtype, context, batch) / run.bandwidth,
        config.num_parameters * target.dtype.itemsize,
        batch * context * per_token,
        draft_weights(config, setting.draft, target.dtype),
        tree.ring.num_bytes // batch,
        peak,
    )


def _let_go(device: torch.device) -> None:
    """Of the cache and graphs of the last line, or of planning, so that their memory counts nowhere else."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _tree(
    drafting: tuple[GlideDraft, DraftHead],
    plan: Callable[[int], Plan],
    context: int,
    batch: int,
    setting: Setting,
) -> Glide:
    options = MethodOptions("tree", tree_shape=setting.tree_shape, max_nodes=setting.max_nodes)
    if setting.auto:
        options = _planned_tree(plan(batch), context)
    method, _ = make_method(options, Sampling(), drafting)
    assert isinstance(method, Glide)
    return method


def _planned_tree(plan: Plan, context: int) -> MethodOptions:
    """The tree that `auto` ranks first for this context, whether or not it would draft at all."""

    def speed(name: str) -> float:
        ratio = plan.costs.ratio(name, context)
        return gain(plan.options[name], plan.acceptance) / ratio if ratio else 0.0

    return plan.options[
        max((name for name in plan.options if plan.options[name].method == "tree"), key=speed)
    ]


@torch.inference_mode()
def _times(
    target: Transformer,
    tree: Glide,
    context: int,
    batch: int,
    capacity: int,
    setting: Setting,
    replayed: bool,
) -> list[Mode]:
    """Greedy, then sampled: vanilla and tree by turns, over one cache."""
    kv = target.new_cache(batch, capacity)
    generator = torch.Generator(target.device).manual_seed(0)
    for layer in range(target.config.num_layers):
        for buffer in kv.layer(layer):
            buffer.normal_(generator=generator)
    target.rope.reserve(capacity)
    kv.lengths.fill_(context)
    rows = [Row([1] * context, row, capacity) for row in range(batch)]
    samplings = [Sampling()] + ([setting.sampling] if setting.sampling else [])
    begins = [
        _rounds(start(target, kv, rows, sampling), method, replayed)
        for sampling in samplings
        for method in (Vanilla(), tree)
    ]
    taken: list[list[float]] = [[] for _ in begins]
    for _ in range(setting.repeats):
        for times, begin in zip(taken, begins, strict=True):
            kv.lengths.fill_(context)
            times.append(1e3 * seconds_a_round(begin(), _WARM_UP, setting.rounds))
    return [_mode(*taken[first : first + 2]) for first in range(0, len(taken), 2)]


def _rounds(state: DecodeState, method: Method, replayed: bool) -> Callable[[], Iterator[object]]:
    """What begins anew at the state and gives a round each time it is asked, as requests run them."""
    if replayed:
        return partial(DeviceRounds(state, method).run, state)
    return partial(host_rounds, state, method, accept_coupled)


def _mode(steps: list[float], rounds: list[float]) -> Mode:
    ratios = [one / step for one, step in zip(rounds, steps, strict=True)]
    return Mode(Spread.of(steps), Spread.of(rounds), Spread.of(ratios))


def read_bytes(config: ModelConfig, dtype: torch.dtype, context: int, batch: int) -> int:
    """What a step must read: every weight but the embedding's other rows, and the rows' keys and values."""
    unread = 0 if config.tied_head else config.vocab_size * config.hidden_size
    kv = batch * context * config.kv_bytes_per_token(dtype.itemsize)
    return (config.num_parameters - unread) * dtype.itemsize + kv
