"""How the draft makes a chain or a tree: level by level, each level one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.attention import AttentionPlan
from longspec.cache import DraftRing
from longspec.decoding.choose import filtered, gumbel
from longspec.decoding.expected import FIRST_DOUBT, MAX_RUN, MIN_RUN, NEXT_DOUBT
from longspec.decoding.lookup import find, graft
from longspec.decoding.methods.drafted import Drafted
from longspec.decoding.native_chain import can_draft_chain, propose_chain
from longspec.decoding.native_round import draft_noise, has_code
from longspec.decoding.rejection import draw_children
from longspec.decoding.round import Models
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree, ancestors
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.draft_passes import FusedDraftPass, NativeDraftPass, PlainDraftPass
from longspec.models.layers import Ops, Stream, look_up
from longspec.models.native_pass import ops_of

if TYPE_CHECKING:
    from longspec.kernels.norm import Residual
    from longspec.kernels.tree import Levels
    from longspec.models.fused import FusedOps

# For wider levels torch's own top-k is faster than our kernel.
_WIDEST = 32


def propose(method: Drafted, models: Models, rows: Slots, sampled: bool) -> TokenTree:
    """The best nodes of a tree of the method's `shape` and of the branch that it looks up."""
    draft, head, ring = models.draft, models.head, rows.ring
    assert draft is not None, "this method needs a draft"
    assert head is not None
    assert ring is not None
    if can_draft_chain(method, models):
        return propose_chain(method, models, rows, sampled)
    levels = level_ranges(method.shape, len(head.token_ids), method.draws)
    size = (rows.num_rows, levels[-1].stop + (method.num_lookup if models.fused else 0))
    device = rows.lengths.device
    tokens, parents = torch.zeros(2, *size, dtype=torch.int64, device=device).unbind(0)
    tree = (tokens, parents, torch.zeros(size, dtype=torch.float32, device=device))
    drafting: _Drafting = (_FusedDrafting if models.fused else _PlainDrafting)(
        models, rows, draft, ring, tree, method.width, max(method.shape) == 1 and not models.fused
    )
    features = draft.features(rows.feature[:, None], len(method.shape))
    noise = _noise(models, rows, len(method.shape)) if sampled and not method.draws else None
    proposals: list[Tensor] = []
    confidence = (rows.running & rows.active).float()
    end = levels[-1].stop
    for depth, level in enumerate(levels[:-1]):
        hidden = drafting.hidden(level, depth, features[depth])
        logits = head(hidden)
        if method.draws:
            proposals.append(_draw_level(models, rows, tree, levels, depth, logits))
        else:
            here = None if noise is None else noise[depth]
            _grow(models, rows, tree, level, len(levels[depth + 1]), logits, here)
        if method.min_confidence and not models.fused:
            confidence = confidence * _confidence(tree, level, proposals)
            if not bool(models.target.agree(confidence >= method.min_confidence).any()):
                end = level.stop + 1
                break
    drafting.end()
    if method.draws:
        return _drawn_tree(method.shape, tokens[:, :end], parents[:, :end], proposals)
    return _best_tree(method, models, rows, (tokens, parents, tree[2]), end)


def _drawn_tree(
    shape: tuple[int, ...], tokens: Tensor, parents: Tensor, proposals: list[Tensor]
) -> TokenTree:
    last = proposals[-1].new_zeros(len(tokens), tokens.shape[1] - sum(q.shape[1] for q in proposals), 1)
    proposals = [*proposals, last.expand(-1, -1, proposals[-1].shape[2])]
    chain = max(shape) == 1
    return TokenTree(tokens, parents, torch.cat(proposals, 1), chain, shape)


def _best_tree(method: Drafted, models: Models, rows: Slots, tree: Levels, end: int) -> TokenTree:
    """The drafted tree with the looked-up branch, pruned to the method's number of nodes."""
    tokens, parents, scores = tree
    is_chain = max(method.shape) == 1 and not method.num_lookup
    if not models.fused:
        grown, scores = TokenTree(tokens[:, :end], parents[:, :end], None, is_chain), scores[:, :end]
        if method.num_lookup:
            ends = rows.lengths + 1
            found = find(rows.text, ends)
            grown, scores = graft(grown, scores, rows.text, ends, method.num_lookup, found)
        return grown.pruned(scores, method.num_nodes)
    from longspec.kernels.lookup import graft_lookup
    from longspec.kernels.tree import prune

    if method.num_lookup:
        chances = (MIN_RUN, MAX_RUN, FIRST_DOUBT, NEXT_DOUBT)
        graft_lookup(tree, end, rows.text, rows.found, rows.lengths, chances)
    if method.num_nodes >= tokens.shape[1]:
        return TokenTree(tokens, parents, None, is_chain)
    return TokenTree(*prune(*tree, method.num_nodes), None, is_chain)


@dataclass
class _Drafting:
    """The draft's passes of one round. The first pass reads the tokens that it has not read yet, with the
    root."""

    models: Models
    rows: Slots
    draft: GlideDraft
    ring: DraftRing
    tree: Levels
    width: int
    chain: bool
    """Whether each level is one node, so that nodes may stand in the ring itself."""
    above: tuple[range, Tensor] | None = None
    """The level before and the hidden states [B, n, E] of its nodes, for a draft that reads them."""

    def __post_init__(self) -> None:
        size, lengths = self.models.pages.size, self.rows.lengths
        self.plan = AttentionPlan(lengths, self.rows.tables, size, 1)
        self._begin()

    def _begin(self) -> None:
        raise NotImplementedError

    def hidden(self, level: range, depth: int, feature: Tensor | None) -> Tensor:
        """The draft's hidden states [B, n, E] at a level's nodes."""
        found = self._hidden(level, depth, feature)
        if self.draft.config.use_parent:
            self.above = level, found
        return found

    def _hidden(self, level: range, depth: int, feature: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _parents(self, level: range, ops: Ops) -> Tensor | None:
        """What the hidden states of the nodes' parents add to the stream, [B, n or 1, E]; None if nothing."""
        if self.above is None:
            return None
        before, projected = self.above[0], self._projected(ops)
        if len(before) == 1:  # all nodes have this parent
            return projected
        parents = self.tree[1][:, level.start : level.stop] - before.start
        # Clamp, because while kernels are only compiled, nothing has written the parents.
        index = parents.clamp(0, len(before) - 1)[:, :, None].expand(-1, -1, projected.shape[-1])
        return projected.gather(1, index)

    def _projected(self, ops: Ops) -> Tensor:
        """The projected hidden states of the level before."""
        reader = self.draft.parent_reader
        assert reader is not None
        assert self.above is not None
        return ops.normed_linear(reader, self._stream(self.above[1]))[0]

    def _stream(self, hidden: Tensor) -> Stream:
        return hidden

    def end(self) -> None:
        """Leave the ring as if nothing had been drafted."""


class _PlainDrafting(_Drafting):
    replaced: tuple[Tensor, Tensor] | None = None
    """The KV in the ring that a chain's nodes have replaced."""

    def _begin(self) -> None:
        rows, ring = self.rows, self.ring
        newest = ring.positions[:, : ring.window].max(1).values
        # A resting row reads nothing: after its root were read, the unread tokens before it would be lost.
        moving = rows.running & rows.active
        num_new = torch.where(moving, (rows.lengths - newest).clamp(1, ring.window), 0)
        back = torch.arange(max(int(num_new.max()), 1), device=newest.device)
        self.positions = (rows.lengths[:, None] - back).clamp(min=0)
        self.entries = ring.claim(self.positions, back < num_new[:, None])
        self.tokens = rows.text.gather(1, self.positions)
        self.tree[0][:, 0] = self.tokens[:, 0]
        if self.chain:
            # A chain's nodes are written into the ring itself, as if they were committed. So a query sees all
            # of the ring that is filled. `end` puts the replaced entries back.
            depths = torch.arange(1, self.tree[0].shape[1], device=newest.device)
            self.taken = (rows.lengths[:, None] + depths) % ring.window

    def _hidden(self, level: range, depth: int, feature: Tensor | None) -> Tensor:
        rows, ring, target = self.rows, self.ring, self.models.target
        if depth == 0:
            tokens, positions = self.tokens, self.positions
            entries: Tensor | None = self.entries
        else:
            tokens = self.tree[0][:, level.start : level.stop]
            positions = (rows.lengths + depth)[:, None].expand_as(tokens)
            entries = positions % ring.window if self.chain else None
            if self.chain and depth == 1:
                # Not earlier, because the first pass may have written there.
                self.replaced = ring.get(self.taken)
        x, pages, sees = look_up(target.table, tokens), self.models.pages, self._sees(level, depth)
        stream, ops = x[:, : len(level)], ops_of(self.draft.ffn)
        stream = stream.clone() if feature is None else stream + feature
        if (parents := self._parents(level, ops)) is not None:
            stream = stream + parents
        if NativeDraftPass.covers(self.draft, pages, target.attention):
            if entries is None:
                entries = torch.arange(ring.window + level.start, ring.window + level.stop).expand_as(tokens)
            native = NativeDraftPass(self.draft, ring, pages, self.plan, target.rope.table)
            return native.read(x, stream, positions, entries, sees)
        run = PlainDraftPass(
            self.draft, ring, pages, target.attention, self.plan, target.rope(positions),
            entries, level.start, sees, len(level), ops,
        )  # fmt: skip
        return self.draft.read(x, stream, run)

    def _sees(self, level: range, depth: int) -> Tensor:
        end = self.rows.lengths + depth
        if depth == 0 or self.chain:
            return (end + 1).clamp(max=self.ring.window)
        nodes = ancestors(self.tree[1][:, : level.stop])[:, level.start :]
        nodes[:, :, 0] = False  # the root is seen in the ring
        return self.ring.sees(end[:, None].expand(-1, len(level)), nodes)

    def end(self) -> None:
        if self.replaced is not None:
            self.ring.put(self.taken, *self.replaced)


class _FusedDrafting(_Drafting):
    def _begin(self) -> None:
        from longspec.kernels.tree import claim_newest

        rows, ring = self.rows, self.ring
        self.newest, self.positions, self.entries = claim_newest(
            rows.text, rows.num_unread, rows.lengths, ring.positions, ring.window, self.tree, self.width
        )

    def _stream(self, hidden: Tensor) -> Residual:
        from longspec.kernels.norm import Residual

        return Residual(hidden)

    def _hidden(self, level: range, depth: int, feature: Tensor | None) -> Tensor:
        from longspec.kernels.norm import Residual
        from longspec.models.fused import FusedOps

        table, ops = self.models.target.table, FusedOps()
        if depth == 0:
            # Copy now: later kernels start before the previous one has finished.
            at = self.positions[:, :1].contiguous()
            positions, entries = self.positions, self.entries
            x, total = ops.embed(self.newest, table, feature, self.draft.reader)
            stream = Residual(total.x[:, :1])
        else:
            x, stream, positions, entries = self._embed_level(level, depth, feature, ops)
            at = positions
        target = self.models.target
        run = FusedDraftPass(
            self.draft, self.ring, self.models.pages, target.attention, self.plan, target.rope.table,
            self.tree[1], positions, entries, at, level.start, depth, ops,
        )  # fmt: skip
        return self.draft.read(x, stream, run)

    def _embed_level(
        self, level: range, depth: int, feature: Tensor | None, ops: FusedOps
    ) -> tuple[Residual, Residual, Tensor, Tensor]:
        """The embedded nodes of a level; the same with what feature and parents add; positions; entries."""
        from longspec.kernels.embed import embed_level

        tokens, table = self.tree[0][:, level.start : level.stop], self.models.target.table
        lengths, first = self.rows.lengths, self.ring.window + level.start
        if isinstance(table, Tensor):
            factor, above = ops.factor(self.draft.reader, tokens.numel()), None
            if self.above is not None:
                above = self.tree[1][:, level.start :], self.above[0].start, self._projected(ops)
            return embed_level(tokens, table, feature, factor, (lengths, depth, first), above)
        places = torch.arange(first, first + len(level), device=lengths.device)
        entries, positions = places.repeat(len(lengths), 1), (lengths + depth)[:, None].repeat(1, len(level))
        if (parents := self._parents(level, ops)) is not None:
            feature = parents if feature is None else feature + parents
        return *ops.embed(tokens, table, feature, self.draft.reader), positions, entries


def _noise(models: Models, rows: Slots, depth: int) -> Tensor:
    """The noise of the target's choice at each depth, [depth, B, V']. The draft adds the same noise, so that
    it proposes what the target is likely to choose. Greedy rows have none."""
    assert models.head is not None
    token_ids, temperature = models.head.token_ids, rows.sampling.temperature
    if models.fused:
        from longspec.kernels.noise import gumbel_noise

        return gumbel_noise(rows.seeds, rows.lengths, token_ids, temperature, 1, depth)
    of_step = draft_noise if has_code(token_ids) else gumbel
    steps = [of_step(rows.seeds, rows.lengths + 1 + step, token_ids).float() for step in range(depth)]
    return torch.where(temperature[:, None] > 0, torch.stack(steps), 0.0)


def _grow(
    models: Models, rows: Slots, tree: Levels, level: range, width: int, logits: Tensor, noise: Tensor | None
) -> None:
    """Add the best children of the tree's last level after it."""
    assert models.head is not None
    if models.fused and width <= _WIDEST:
        from longspec.kernels.topk import best_children

        assert isinstance(models.head, DraftHead), "shapes stay as they are"
        temperature = None if noise is None else rows.sampling.temperature
        best_children(logits, tree, level, width, temperature, noise, models.head.vocab_ids)
        return
    if noise is not None:
        temperature = rows.sampling.temperature
        warm = torch.where(temperature > 0, temperature, 1.0)[:, None, None]
        logits = logits / warm + noise[:, None]
    tokens, parents, scores = tree
    indices, above, best = best_of_level(logits, scores[:, level.start : level.stop], width)
    behind = slice(level.stop, level.stop + width)
    tokens[:, behind] = models.head.token_ids[indices]
    parents[:, behind] = level.start + above
    scores[:, behind] = best


def _draw_level(
    models: Models, rows: Slots, tree: Levels, levels: list[range], depth: int, logits: Tensor
) -> Tensor:
    """Add the same number of children to each node of a level, drawn from the draft's distribution. Returns
    the distribution [B, n, V]."""
    assert models.head is not None
    level, width = levels[depth], len(levels[depth + 1])
    (B, n), size = logits.shape[:2], models.target.config.vocab_size
    whole = logits.new_full((B, n, size), -torch.inf)
    whole[:, :, models.head.token_ids] = logits.nan_to_num(0.0, posinf=0.0)
    # No repetition penalty, because it depends on each node's path; without it q is only a little further
    # from p.
    settings = rows.sampling.without_penalty()
    q = torch.stack([filtered(one, settings).softmax(-1) for one in whole.unbind(1)], 1)
    nodes = torch.arange(level.start, level.stop, device=q.device)
    found, real = draw_children(q, width // n, rows.seeds, rows.lengths + depth + 1, nodes)
    # A child that was not drawn repeats the first child, which then has no probability left in q.
    found = torch.where(real, found, found[:, :, :1])
    behind = slice(level.stop, level.stop + width)
    tree[0][:, behind] = found.flatten(1)
    tree[1][:, behind] = nodes.repeat_interleave(width // n)
    return q


def _confidence(tree: Levels, level: range, proposals: list[Tensor]) -> Tensor:
    """The draft's own probability of the newest token of each row's chain, [B].

    When sampling, the probability after the noise, because it shows how likely the target chooses the token.
    """
    tokens, _, scores = tree
    if proposals:
        return proposals[-1][:, 0].gather(1, tokens[:, level.stop : level.stop + 1])[:, 0]
    return (scores[:, level.stop] - scores[:, level.start]).exp()


def level_ranges(shape: tuple[int, ...], vocab: int, draws: bool = False) -> list[range]:
    """The nodes of each level, the root's level first. A level has as many nodes as the shape says, but at
    most one child for each parent and token. If nodes are drawn, each parent has the same number of
    children."""
    levels = [range(1)]
    for above, width in zip((1, *shape), shape, strict=False):
        last = levels[-1]
        width = len(last) * (width // above) if draws else width
        levels.append(range(last.stop, last.stop + min(width, len(last) * vocab)))
    return levels


def best_of_level(logits: Tensor, scores: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best children of nodes with logits [B, n, V] and scores [B, n]: index, node and score, [B, w]."""
    # A draft that computes nan may propose anything, but its scores must still have an order.
    best = F.log_softmax(logits, -1).nan_to_num(-torch.inf).topk(min(width, logits.shape[-1]), -1)
    total = (scores[:, :, None] + best.values).flatten(1)
    top = total.topk(min(width, total.shape[1]), -1)
    parents = top.indices // best.indices.shape[-1]
    return best.indices.flatten(1).gather(1, top.indices), parents, top.values
