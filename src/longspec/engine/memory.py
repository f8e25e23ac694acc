"""The memory of an engine, computed from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from longspec.attention.base import copies_whole
from longspec.cache import DraftRing
from longspec.config import DraftConfig, ModelConfig
from longspec.decoding.methods import MOST_NODES
from longspec.errors import UserError, shown, whole_number
from longspec.models.placement import (
    OVERHEAD,
    draft_weights,
    free_memory,
    gigabytes,
    plan_memory,
    total_memory,
)
from longspec.models.weights import Precision

# Rows that run at once unless a caller says otherwise.
ROWS_ON_GPU, ROWS_ON_CPU = 128, 16
MOST_ROWS = 2**16
# The share of the memory left beside the weights that may become pages.
SHARE_ON_GPU, SHARE_ON_CPU = 0.85, 0.5
# Entries of a page: a tile of our kernels, because the hardware copies whole tiles; few for plain passes,
# because only full pages are shared.
FUSED_PAGE, PLAIN_PAGE = 128, 16
# Bytes of a round that do not grow with the vocabulary: partial results of attention, masks and others.
_SMALL = 64 * 2**20


@dataclass(frozen=True)
class EngineSize:
    """The size of an engine."""

    max_rows: int
    max_length: int
    page_size: int
    num_pages: int

    @property
    def num_tokens(self) -> int:
        """Tokens that all sequences together can hold."""
        return self.num_pages * self.page_size


def page_size(dtype: torch.dtype, head_dim: int, fused: bool) -> int:
    """Entries of a page of KV in this dtype, for fused or plain passes."""
    return FUSED_PAGE if fused and dtype != torch.float32 and copies_whole(head_dim, dtype) else PLAIN_PAGE


def size_engine(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    free: int,
    page: int,
    max_length: int | None = None,
    max_rows: int | None = None,
    kv_bytes: int | None = None,
    limit: int | None = None,
) -> EngineSize:
    """The pages and rows that fit into `free` bytes, or into `kv_bytes` of pages.

    A text of `max_length` tokens must fit; without one, it is `limit`, or what fits. No more pages are
    planned than `max_rows` such texts fill.
    """
    if max_rows is not None and not 1 <= whole_number("max_rows", max_rows) <= MOST_ROWS:
        raise UserError(f"max_rows is {shown(max_rows)}; it must lie between 1 and {MOST_ROWS}")
    on_gpu = device.type == "cuda"
    rows = max_rows or (ROWS_ON_GPU if on_gpu else ROWS_ON_CPU)
    longest = max_length or limit or config.max_length
    per_page = page * config.kv_bytes_per_token(dtype.itemsize)
    share = SHARE_ON_GPU if on_gpu else SHARE_ON_CPU
    room = kv_bytes if kv_bytes is not None else int(max(0, free - OVERHEAD) * share)
    beyond = MOST_NODES + page
    wanted = rows * -(-(longest + beyond) // page)
    num_pages = min(wanted, room // per_page)
    fits = num_pages * page - beyond
    if fits < longest and (max_length is not None or fits < 2):
        asked = 2 if max_length is None else longest  # without a limit, any text would do
        needed = -(-(asked + beyond) // page) * per_page
        bound = f"{device} has room for" if kv_bytes is None else "kv_memory is"
        lower = f"lower max_length to {fits}, or " if fits >= 2 else ""
        more = "" if kv_bytes is None else "give more kv_memory, or "
        raise UserError(
            f"a text of {asked} tokens, with room for a tree, takes {gigabytes(needed)} of KV, but {bound} "
            f"{gigabytes(room)}; {lower}{more}load the target in a smaller dtype or kv_dtype, or "
            "on another device"
        )
    return EngineSize(rows, min(longest, fits), page, num_pages)


def kv_bytes(config: ModelConfig, dtype: torch.dtype, num_rows: int, length: int) -> int:
    """Bytes of pages for `num_rows` texts of up to `length` tokens at once, written by vanilla rounds."""
    tokens = num_rows * (length + 2 * FUSED_PAGE)
    # `size_engine` needs room for a text and a tree.
    return max(tokens, length + MOST_NODES + 2 * FUSED_PAGE) * config.kv_bytes_per_token(dtype.itemsize)


def longest_chunk(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, least: int, most: int
) -> int:
    """Tokens of a prompt, a power of two, whose activations take a quarter of the free memory at most."""
    if device.type == "cpu":
        return most
    free = free_memory(device)
    while most > least and 4 * _activations(config, most, dtype) > free:
        most //= 2
    return most


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes, part by part."""

    weights: int
    kv: int
    """Pages for all rows, with room for a tree behind each."""
    rope: int
    draft_weights: int
    draft_kv: int
    """Of all rows; the same at every context."""
    graphs: int
    """Reserved for the pool that captured rounds share; 0 where rounds are not captured."""
    working: int
    """Reserved for libraries, the activations of a chunk of prompts and the logits."""

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that is needed, and what the device has."""

    needs: MemoryNeeds
    free: int
    device_total: int

    @property
    def left(self) -> int:
        """Free memory that nothing is planned for; below 0 it does not fit."""
        return self.free - self.needs.total


def plan_decoding(
    config: ModelConfig,
    draft: DraftConfig | None,
    context: int,
    batch: int,
    tree_shape: tuple[int, ...],
    precision: Precision,
    *devices: torch.device,
) -> MemoryBudget:
    """The memory for answering `batch` prompts at once, each of `context` tokens with its answer.

    With several devices, the memory of each rank."""
    target, dtype = plan_memory(config, precision, *devices), precision.dtype
    device, num_ranks = devices[0], len(devices)
    share = config.shared_by(num_ranks)
    on_gpu = device.type == "cuda"
    num_nodes = sum(tree_shape) + 1
    page = page_size(precision.kv_dtype, config.head_dim, on_gpu)
    num_pages = batch * -(-(context + num_nodes) // page)
    rope = 2 * (context + MOST_NODES) * config.head_dim * torch.float32.itemsize
    needs = MemoryNeeds(
        weights=target.weights,
        kv=num_pages * page * target.kv_per_token,
        rope=rope,
        draft_weights=draft_weights(config, draft, dtype, num_ranks) if draft else 0,
        draft_kv=batch * DraftRing.size_of(share, draft, num_nodes, dtype) if draft else 0,
        graphs=graph_pool(config, draft, batch, tree_shape, dtype) if on_gpu else 0,
        working=OVERHEAD,
    )
    return MemoryBudget(needs, target.free, total_memory(device))


def graph_pool(
    config: ModelConfig,
    draft: DraftConfig | None,
    batch: int,
    tree_shape: tuple[int, ...],
    dtype: torch.dtype,
) -> int:
    """About the most that a captured round holds at a time: the scores, and the activations of a layer."""
    nodes = batch * (sum(tree_shape) + 1)
    verify = nodes * 2 * 4 * config.vocab_size + _activations(config, nodes, dtype)
    if draft is None:
        return verify + _SMALL
    # For one level: the scores, the scores with noise and their log-softmax. Also the noise of all levels.
    width = draft.draft_vocab or config.vocab_size
    return verify + batch * 4 * (3 * max(tree_shape) + len(tree_shape)) * width + _SMALL


def _activations(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of a layer's activations for `num_tokens` tokens."""
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = 3 * config.intermediate_size + 4 * config.hidden_size + 2 * heads * config.head_dim
    return num_tokens * layer * dtype.itemsize
