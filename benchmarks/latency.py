"""What a vanilla step and a speculative round cost, by context and batch, with random weights and KV.

Tokens that random weights draft are hardly ever accepted; what a round costs does not depend on that.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.shapes import fill_pages, random_draft, random_target, shape_named
from longspec.attention import choose_backend
from longspec.bench.environment import PeakMemory, copy_bandwidth
from longspec.bench.summary import Spread
from longspec.config import DEFAULT_TREE, DraftConfig
from longspec.decoding.methods import MOST_NODES, VANILLA, Method, Tree
from longspec.decoding.methods.tree import NUM_LOOKUP
from longspec.decoding.sampling import Sampling
from longspec.engine.costs import known_costs
from longspec.engine.engine import Engine
from longspec.engine.loop import IN_FLIGHT
from longspec.engine.make import make_engine
from longspec.engine.memory import page_size
from longspec.engine.transfer import Report
from longspec.errors import UserError
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.load import pack_ends
from longspec.models.placement import (
    check_fits,
    draft_weights,
    free_memory,
    gigabytes,
    pick_device,
    pick_dtype,
)
from longspec.models.target import Transformer
from longspec.models.weights import Precision, pack, pick_precision, with_kv_dtype

# Rounds before the clock starts: kernels are compiled, and as many as may be in flight are.
_WARM_UP = 5
# Beside a cache there must be room for activations, logits and graphs.
_WORKING = 2**28


@dataclass(frozen=True)
class LatencySetting:
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
    weights: str = "auto"
    """What the target's weights are rounded to, and on a GPU the draft's with them."""
    kv_dtype: str = "auto"
    attention: str = "auto"
    """auto is the backend that replays rounds: triton, on a GPU."""
    exact: bool = False
    """Whether rounds are those whose bits do not depend on what is computed beside."""

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
        Tree(self.tree_shape, self.max_nodes)  # refuses what is wrong


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
    def modes(self) -> dict[str, Mode]:
        """Greedy, and sampled where it was measured."""
        return {"greedy": self.greedy} | ({"sampled": self.sampled} if self.sampled else {})

    @property
    def beyond(self) -> int:
        """Memory at the peak beyond the target's weights and KV: the draft, graphs, activations, tables."""
        return self.peak_memory - self.weights_bytes - self.kv_bytes

    @property
    def sampling_costs(self) -> float | None:
        """How much longer a round takes when sampling: 0.1 is 10% longer."""
        return None if self.sampled is None else self.sampled.round.median / self.greedy.round.median - 1

    def speeds(self, mode: Mode, tau: float | None) -> dict[str, float]:
        """All rows together, per second: vanilla's tokens, the tree's rounds, and its tokens at `tau`."""
        rounds = 1e3 * self.batch / mode.round.median
        steps = 1e3 * self.batch / mode.step.median
        speeds = {"vanilla_tokens_per_second": steps, "rounds_per_second": rounds}
        return speeds if tau is None else speeds | {"tree_tokens_per_second": tau * rounds}


@dataclass(frozen=True)
class Missing:
    """A context and batch that could not be measured."""

    context: int
    batch: int
    why: str


@dataclass(frozen=True)
class Latencies:
    """A whole run."""

    setting: LatencySetting
    device: torch.device
    dtype: torch.dtype
    replays: bool
    """Whether rounds were captured and replayed."""
    bandwidth: float
    """Bytes per second of a large copy, read and written."""
    lines: list[Latency]
    missing: list[Missing]


class _NotMeasured(Exception):
    """Why a context and batch could not be measured."""


def measure_latency(
    setting: LatencySetting, on_line: Callable[[Latencies], None] = lambda run: None
) -> Latencies:
    """Every context with every batch; `on_line` is told after each what there is so far."""
    device = pick_device(setting.device)
    dtype = pick_dtype(setting.dtype, device)
    config = shape_named(setting.shape)
    attention = choose_backend(setting.attention)
    precision = pick_precision(setting.weights, dtype, device)
    precision = with_kv_dtype(precision, setting.kv_dtype, config.head_dim, device, attention)
    check_fits(setting.shape, config, Precision(dtype), device)
    bandwidth = copy_bandwidth(device)
    target = random_target(config, device, dtype)
    target.attention = attention
    pack(target.blocks, precision)
    pack_ends(target, precision)
    drafting = random_draft(target, setting.draft)
    replays = device.type == "cuda" and _can_fuse(target)
    found = Latencies(setting, device, dtype, replays, bandwidth, [], [])
    for context in setting.contexts:
        for batch in setting.batches:
            try:
                found.lines.append(_line(target, drafting, context, batch, found))
            except (_NotMeasured, torch.OutOfMemoryError) as error:
                # The first line is enough: the allocator's advice goes on for many.
                found.missing.append(Missing(context, batch, str(error).partition("\n")[0]))
            on_line(found)
    return found


def _line(
    target: Transformer, drafting: tuple[GlideDraft, DraftHead], context: int, batch: int, run: Latencies
) -> Latency:
    setting, config, device = run.setting, target.config, target.device
    _free(device)
    tree = Tree(setting.tree_shape, setting.max_nodes)
    if setting.auto:
        tree = _planned_tree(_engine(target, drafting, context, batch, setting), context, batch)
        _free(device)
    memory = PeakMemory(device)
    engine = _engine(target, drafting, context, batch, setting)
    tree = tree.fit(engine.models)
    with engine.paused():
        engine.device.reserve_nodes(tree.num_drafted)
        modes = _times(engine, tree, context, batch, setting)
    ring = engine.device.slots.ring
    assert ring is not None
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else memory.peak
    return Latency(
        context,
        batch,
        tree.tree_shape,
        tree.num_nodes,
        modes[0],
        modes[1] if len(modes) > 1 else None,
        1e3 * read_bytes(target, context, batch) / run.bandwidth,
        weight_bytes(target),
        batch * context * config.kv_bytes_per_token(target.kv_dtype.itemsize),
        draft_weights(config, setting.draft, target.dtype),
        ring.num_bytes // engine.device.slots.num_rows,
        peak,
    )


def _engine(
    target: Transformer,
    drafting: tuple[GlideDraft, DraftHead],
    context: int,
    batch: int,
    setting: LatencySetting,
) -> Engine:
    """An engine whose every row has pages of its own, for this context and what the rounds may add."""
    config, dtype, device = target.config, target.kv_dtype, target.device
    width = len(setting.tree_shape) + NUM_LOOKUP + 1
    length = context + (setting.rounds + _WARM_UP + 3) * width
    page = page_size(dtype, config.head_dim, _can_fuse(target))
    # As many as `size_engine` wants for so many rows of this length.
    pages = batch * -(-(length + MOST_NODES + page) // page)
    needed = pages * page * config.kv_bytes_per_token(dtype.itemsize)
    if needed + _WORKING > (free := free_memory(device)):
        raise _NotMeasured(
            f"does not fit: the KV takes {gigabytes(needed)} and {gigabytes(free)} are free on {device}; "
            "a smaller context or batch would"
        )
    engine = make_engine(
        target, *drafting, max_length=length, max_rows=batch, kv_memory=needed, exact=setting.exact
    )
    fill_pages(engine.models.pages)
    return engine


@torch.inference_mode()
def _can_fuse(target: Transformer) -> bool:
    """Whether the engine will run rounds by our own kernels; they are for tensors without gradients."""
    return target.attention.can_fuse(target.embedding, target.config.head_dim)


def _free(device: torch.device) -> None:
    """Free the last engine and its graphs, so that their memory is not counted again."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _planned_tree(engine: Engine, context: int, batch: int) -> Tree:
    """The tree that `auto` ranks first here, by what is measured or remembered, whether or not it would draft
    at all."""
    with engine.paused() as device:
        engine.adopt(known_costs(device, engine.candidates))
    policy, rows = engine.policy, device.bucket(batch)
    trees = [one for one in policy.methods if isinstance(one, Tree)]
    return max(trees, key=lambda one: policy.gain(one) / policy.costs.seconds(one, rows, context))


def _times(engine: Engine, tree: Method, context: int, batch: int, setting: LatencySetting) -> list[Mode]:
    """Greedy, then sampled: vanilla and tree by turns, over the same pages."""
    methods: dict[str, Method] = {"vanilla": VANILLA, "tree": tree}
    modes = []
    for sampling in [Sampling()] + ([setting.sampling] if setting.sampling else []):
        rows = torch.arange(batch, device=engine.device.slots.lengths.device)
        engine.device.slots.sampling.put(rows, [sampling] * batch)
        taken: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(setting.repeats):
            for name, method in methods.items():
                engine.device.place_rows(batch, context)
                if engine.models.fused and method.uses_draft:
                    engine.device.read_into_rings(range(batch))
                seconds = _seconds_a_round(engine, method, batch, setting.rounds, not sampling.greedy)
                taken[name].append(1e3 * seconds)
        modes.append(_mode(*taken.values()))
    return modes


def _seconds_a_round(engine: Engine, method: Method, batch: int, rounds: int, sampled: bool) -> float:
    """Of rounds one after the other, whose reports are read as late as the engine reads them."""
    device, flight = engine.device, deque[Report]()
    in_flight = IN_FLIGHT if engine.models.target.device.type == "cuda" else 0

    def run(count: int) -> None:
        for _ in range(count):
            flight.append(device.round(method, batch, [True] * batch, sampled))
            while len(flight) > in_flight:
                flight.popleft().read()
        while flight:
            flight.popleft().read()

    run(_WARM_UP)
    started = time.perf_counter()
    run(rounds)
    return (time.perf_counter() - started) / rounds


def _mode(steps: list[float], rounds: list[float]) -> Mode:
    ratios = [one / step for one, step in zip(rounds, steps, strict=True)]
    return Mode(Spread.of(steps), Spread.of(rounds), Spread.of(ratios))


def weight_bytes(target: Transformer) -> int:
    """Of the target's weights as they are kept; a tied head counts once unless it is kept apart."""
    precision = target.precision or Precision(target.dtype)
    if precision.rounding is None:
        return target.config.num_parameters * target.dtype.itemsize
    return precision.weight_bytes(target.config, target.device)


def read_bytes(target: Transformer, context: int, batch: int) -> int:
    """What a step must read: every weight but the embedding's other rows, and the rows' keys and values."""
    config, rounding = target.config, target.precision.rounding if target.precision else None
    kv = batch * context * config.kv_bytes_per_token(target.kv_dtype.itemsize)
    per_weight = float(target.dtype.itemsize)
    if rounding is not None and rounding.table is not None:
        per_weight = rounding.table_bytes
    apart = rounding is not None or not config.tied_head
    unread = config.vocab_size * config.hidden_size if apart else 0
    return weight_bytes(target) - int(unread * per_weight) + kv
