"""How the draft makes chains on a CPU: one call of our C code (`native/draft.h`) for each level."""

from __future__ import annotations

import math
from ctypes import pointer
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longspec.attention import AttentionPlan
from longspec.decoding.native_round import rows_of
from longspec.decoding.tree import TokenTree
from longspec.models.draft import ContextHead, DraftHead
from longspec.models.draft_passes import NativeDraftPass
from longspec.models.layers import look_up
from longspec.models.native_linears import NativeLinear
from longspec.models.native_pass import native
from longspec.native.build import DraftedChain, code

if TYPE_CHECKING:
    from longspec.decoding.methods.drafted import Drafted
    from longspec.decoding.round import Models
    from longspec.decoding.slots import Slots


def can_draft_chain(method: Drafted, models: Models) -> bool:
    """Whether the C code can draft for this method with these models."""
    draft, target = models.draft, models.target
    is_plain_chain = max(method.shape) == 1 and not method.draws and not method.num_lookup
    if draft is None or not is_plain_chain or models.fused or target.shard is not None:
        return False
    readers = [] if draft.parent is None else [draft.parent]
    linears = all(isinstance(linear, NativeLinear) for linear in (_head_of(models)[0], *readers))
    return linears and NativeDraftPass.covers(draft, models.pages, target.attention)


def propose_chain(method: Drafted, models: Models, rows: Slots, sampled: bool) -> TokenTree:
    """A chain for each row, of at most as many tokens as the method's shape has levels."""
    draft, target = models.draft, models.target
    assert draft is not None
    num_levels, num_rows = min(len(method.shape), method.num_nodes - 1), rows.num_rows
    tokens, scores = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.float32)
    chain = _chain_of(models, rows, num_levels, sampled, tokens, scores)
    # Tokens that the ring lacks, their positions and their entries; `window` of each row are the most.
    claimed = torch.empty(3, num_rows * chain.window, dtype=torch.int64).unbind(0)
    num_tokens = code().claim(chain, *(part.data_ptr() for part in claimed))
    fresh, positions, entries = (part[: num_rows * num_tokens] for part in claimed)
    features = draft.features(rows.feature[:, None], num_levels)
    nodes, confidence, threads = [rows.roots], scores.new_zeros(num_rows), torch.get_num_threads()
    moving = rows.running & rows.active
    doubt = math.log(method.min_confidence) if method.min_confidence else -math.inf
    for level in range(num_levels):
        x, feature = look_up(target.table, fresh).contiguous(), features[level]
        code().chain_level(
            chain, level, x.data_ptr(), None if feature is None else feature.data_ptr(), num_tokens,
            positions.data_ptr(), entries.data_ptr(), threads,
        )  # fmt: skip
        num_tokens, fresh = 1, tokens.clone()
        nodes.append(fresh)
        confidence += scores
        if method.min_confidence and not bool((moving & (confidence >= doubt)).any()):
            break
    code().end_chain(chain, len(nodes) - 1)
    return TokenTree.chain(torch.stack(nodes, 1))


def _head_of(models: Models) -> tuple[nn.Module | None, Tensor | None, Tensor | None]:
    """The draft's head, the rows that the context adds to it, and the tokens of all of them."""
    head = models.head
    own, more = (head.head, head.rows_of_context) if isinstance(head, ContextHead) else (head, None)
    if head is None or type(own) is not DraftHead:  # a head of another kind may compute something else
        return None, None, None
    return own.rows or models.target.head, more, head.token_ids


def _chain_of(
    models: Models, rows: Slots, num_levels: int, sampled: bool, tokens: Tensor, scores: Tensor
) -> DraftedChain:
    """What the C code reads and writes; `tokens` and `scores` become those of each level's nodes."""
    draft, target, ring = models.draft, models.target, rows.ring
    assert draft is not None
    assert ring is not None
    B, size = rows.num_rows, target.config.hidden_size
    head, more, token_ids = _head_of(models)
    assert head is not None
    assert token_ids is not None
    hidden = torch.empty(B, size, dtype=torch.float32)
    replaced = torch.empty(num_levels, B, 2, draft.num_kv_heads, draft.head_dim, dtype=torch.float32)
    plan = AttentionPlan(rows.lengths, rows.tables, models.pages.size, 1)
    level = NativeDraftPass(draft, ring, models.pages, plan, target.rope.table)
    chain = DraftedChain(
        num_more=0 if more is None else len(more),
        more=None if more is None else more.data_ptr(),
        token_ids=token_ids.data_ptr(),
        window=ring.window,
        ring_size=ring.positions.shape[1],
        ring_positions=ring.positions.data_ptr(),
        replaced=replaced.data_ptr(),
        hidden=hidden.data_ptr(),
        tokens=tokens.data_ptr(),
        scores=scores.data_ptr(),
    )
    chain.kept = [hidden, replaced, more, token_ids]
    level.describe(chain, B)
    chain.head, chain.rows = pointer(native(head).matrix), pointer(rows_of(rows))
    if draft.parent_reader is not None:
        norm, parent = draft.parent_reader
        chain.parent, chain.parent_norm = pointer(native(parent).matrix), norm.weight.data_ptr()
    if sampled:
        chain.temperature, chain.seeds = rows.sampling.temperature.data_ptr(), rows.seeds.data_ptr()
    return chain
