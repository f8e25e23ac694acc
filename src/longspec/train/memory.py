"""The memory that training takes, worked out from shapes alone."""

from __future__ import annotations

from longspec.config import DraftConfig, ModelConfig
from longspec.train.losses import CHUNK_BYTES

# Bytes per weight of the draft: the bf16 weight, its fp32 copy, its gradient and two moments.
_STATE_BYTES = 18
# Scores of a chunk that exist at once: of draft and target, their exponents, the gradient.
_CHUNKS = 4
# Of the memory that is free, so much is planned for. A CPU shares its memory with other programs.
_SHARE = {"cuda": 0.8, "cpu": 0.4}
# Tokens at a time on a CPU: more take more memory, and no less time.
_MOST_CPU_TOKENS = 8192


def state_bytes(target: ModelConfig, draft: DraftConfig, itemsize: int) -> int:
    """The target's weights, and the draft's with its optimizer."""
    return target.num_parameters * itemsize + draft.num_parameters(target) * _STATE_BYTES


def working_bytes(
    target: ModelConfig,
    draft: DraftConfig,
    itemsize: int,
    num_tokens: int,
    device_type: str,
    recompute_levels: bool = True,
) -> int:
    """What so many tokens at a time take beside the weights: activations, and a chunk of scores.

    At most: the draft is asked at fewer tokens where prompts are not learnt.
    """
    num_cross, heads = len(draft.layers_of(target)), target.num_heads * target.head_dim
    kept = target.hidden_size + 2 * num_cross * target.num_kv_heads * target.head_dim
    layer = 3 * draft.ffn_size(target) + 6 * target.hidden_size + 2 * (1 + num_cross) * heads
    if draft.use_parent:  # of each lag, its feature and its hidden state are kept
        kept += 2 * draft.max_lag * target.hidden_size
    levels = 1 if recompute_levels or not draft.use_parent else draft.max_lag
    scores = 4 * num_tokens * (draft.draft_vocab or target.vocab_size)
    activations = num_tokens * (kept + (1 + levels) * layer) * itemsize
    return activations + _CHUNKS * min(scores, CHUNK_BYTES[device_type])


def must_recompute(
    target: ModelConfig, draft: DraftConfig, itemsize: int, num_tokens: int, free: int, device_type: str
) -> bool:
    """Whether so many tokens at a time need more than the `free` bytes if all levels are kept."""
    needed = working_bytes(target, draft, itemsize, num_tokens, device_type, recompute_levels=False)
    return needed > _SHARE[device_type] * free


def fitting_micro_batch(
    target: ModelConfig,
    draft: DraftConfig,
    itemsize: int,
    seq_length: int,
    batch: int,
    free: int,
    device_type: str,
) -> int:
    """The largest divisor of `batch` whose sequences fit at a time into `free` bytes; 1 if none does."""
    room = _SHARE[device_type] * free
    for size in (size for size in range(batch, 1, -1) if batch % size == 0):
        tokens = size * seq_length
        if device_type == "cpu" and tokens > _MOST_CPU_TOKENS:
            continue
        if working_bytes(target, draft, itemsize, tokens, device_type) <= room:
            return size
    return 1
