"""Drafting with GLIDE: a chain or a tree, level by level, each level one pass of the draft."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.attention import Attention, AttentionPlan
from longspec.cache import DraftCache, KVCache
from longspec.decoding.choose import filtered, gumbel
from longspec.decoding.copied import Text, graft
from longspec.decoding.loop import DecodeState
from longspec.decoding.rejection import draw_children
from longspec.decoding.tree import TokenTree, ancestors
from longspec.models.draft import ContextHead, DraftHead, GlideDraft


@dataclass
class _Level:
    """The nodes of one depth."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    """Sum of log-probabilities from the root, fp32 [B, n]."""


class Glide:
    """`tree_shape` says how many nodes each depth has; a chain has one each.

    The best nodes of a whole level are kept by cumulative log-probability. For `rejection` (`draws`) that
    would bias the draw, so each node gets a fixed number of children there, and nothing is pruned.

    With `min_confidence` a chain ends behind the first token to which the draft itself gives less: what
    would follow is hardly ever accepted. The doubted token stays, for it is drafted already; and to leave out
    what was drawn because of what it is would bias the draw.

    With `num_copied` a branch of so many tokens at most is copied from the text's own past, see `copied`.
    """

    def __init__(
        self,
        draft: GlideDraft,
        head: DraftHead,
        tree_shape: tuple[int, ...],
        max_nodes: int | None,
        draws: bool,
        name: str,
        min_confidence: float = 0.0,
        num_copied: int = 0,
    ) -> None:
        assert not min_confidence or max(tree_shape) == 1, "only a chain can end early"
        self.name = name
        if draws:
            tree_shape, max_nodes, num_copied = _drawn_shape(tree_shape), None, 0
        self.tree_shape: tuple[int, ...] | None = tree_shape
        self._shape = tree_shape
        self._draft, self._head = draft, head
        self._words: DraftHead | ContextHead = head
        self._draws, self._min_confidence = draws, min_confidence
        # No more than the ring takes in at once.
        self.num_copied = num_copied = min(num_copied, draft.config.window - 1)
        self._text: Text | None = None
        whole = sum(tree_shape) + 1 + num_copied
        self._max_nodes = max_nodes or whole
        self.num_nodes = min(self._max_nodes, whole)
        self.max_nodes = self.num_nodes if self.num_nodes < whole else None
        # A cache has room for the nodes, so no row of emitted tokens may be longer.
        self.depth = min(max(len(tree_shape), num_copied), self.num_nodes - 1)
        key = (name, tree_shape, max_nodes, num_copied, id(draft))
        self.device_key: tuple[Hashable, ...] | None = None if draws or min_confidence else key
        self._layers = draft.config.layers_of(draft.target_config)
        self.ring: DraftCache | None = None

    def begin(self, state: DecodeState) -> None:
        """Fill the ring with the last `window` tokens before the root: more than that is never seen."""
        target, window = state.target, self._draft.config.window
        if self.ring is None:
            self.ring = DraftCache.empty(
                target.config,
                self._draft.config,
                len(state.rows),
                sum(self._shape) + 1,
                target.device,
                target.dtype,
            )
        self.ring.clear()
        texts = [row.prompt + row.tokens for row in state.rows]
        if self.num_copied:
            if self._text is None:
                self._text = Text.empty(len(texts), state.cache.capacity, target.device)
            self._text.fill(texts)
        if not target.attention.fuses(state.feature):
            # What was said last comes first: should there be no room for all, it is the likelier.
            self._words = self._head.in_context(chain.from_iterable(map(reversed, texts)))
        ends = state.cache.lengths.tolist()
        tails = [text[:end][-window:] for text, end in zip(texts, ends, strict=True)]
        most = max(map(len, tails))
        tokens = torch.tensor([tail + [0] * (most - len(tail)) for tail in tails], device=target.device)
        counts = torch.tensor([len(tail) for tail in tails], device=target.device)
        self._append(state, tokens, counts, state.cache.lengths)

    def follow(self, state: DecodeState) -> None:
        """Bring what the last round emitted into the ring."""
        self._learn_words(state)
        self._append(state, state.emitted, state.num_emitted, state.cache.lengths + 1)

    def propose(self, state: DecodeState) -> TokenTree:
        """See `Method.propose`."""
        assert self.ring is not None, "begin comes first"
        # A chain that may end early asks the host after each token.
        fused = state.target.attention.fuses(state.target.embedding)
        if fused and not self._draws and not self._min_confidence:
            from longspec.decoding.methods.fused_glide import propose_tree

            drafting = (self._draft, self._head)
            copying = None if self._text is None else (self._text, self.num_copied)
            return propose_tree(state, drafting, self.ring, self._shape, self._max_nodes, copying)
        self.follow(state)
        B = len(state.rows)
        zero = torch.zeros(B, 1, dtype=torch.int64, device=state.roots.device)
        levels = [_Level(state.roots[:, None], zero, zero.float())]
        plan = state.target.attention.plan(state.cache.lengths, 1)
        proposals: list[Tensor] = []
        sure = [not row.finished for row in state.rows]
        for depth in range(len(self._shape)):
            logits = self._words(self._forward(state, levels, plan))
            if self._draws:
                level, q = self._drawn_level(state, levels, logits, depth)
                proposals.append(q)
            else:
                level = self._best_level(state, levels, logits, depth)
            levels.append(level)
            if self._min_confidence:
                confidence = self._confidence(levels, proposals)
                sure = [
                    held and one >= self._min_confidence for held, one in zip(sure, confidence, strict=True)
                ]
                if not any(sure):
                    break
        tokens = torch.cat([level.tokens for level in levels], 1)
        parents = torch.cat([level.parents for level in levels], 1)
        if self._draws:
            proposals.append(proposals[-1].new_zeros(B, levels[-1].tokens.shape[1], proposals[-1].shape[2]))
            return TokenTree(tokens, parents, torch.cat(proposals, 1))
        tree, scores = TokenTree(tokens, parents), torch.cat([level.scores for level in levels], 1)
        if self._text is not None:
            tree, scores = graft(tree, scores, self._text, state.cache.lengths + 1, self.num_copied)
        return tree.pruned(scores, self._max_nodes)

    def _confidence(self, levels: list[_Level], proposals: list[Tensor]) -> list[float]:
        """The draft's own probability of the newest token of each row's chain.

        When sampling, that of its logits with the noise: how clearly the token stands out there tells how
        likely the target is to choose it as well.
        """
        if self._draws:
            chances = proposals[-1][:, 0].gather(1, levels[-1].tokens)
        else:
            chances = (levels[-1].scores - levels[-2].scores).exp()
        found: list[float] = chances[:, 0].tolist()
        return found

    def _learn_words(self, state: DecodeState) -> None:
        """Let what the last round emitted be proposed from now on, in the vocabulary or not."""
        if isinstance(self._words, ContextHead):
            for tokens, count in zip(state.emitted.tolist(), state.num_emitted.tolist(), strict=True):
                self._words.add(tokens[:count])

    def _append(self, state: DecodeState, tokens: Tensor, counts: Tensor, end: Tensor) -> None:
        """Bring committed tokens [B, T], the first `counts` [B] that end before `end` [B], into the ring."""
        assert self.ring is not None, "begin comes first"
        positions, entries = self._claim(tokens, counts, end)
        x = F.embedding(tokens, state.target.embedding)
        _, k, v = self._draft.project(x, state.target.rope(positions))
        self.ring.put(entries, k, v)

    def _claim(self, tokens: Tensor, counts: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and entries of what `_append` brings, both [B, T]."""
        assert self.ring is not None
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        positions, wanted = ((end - counts)[:, None] + offsets).clamp(min=0), offsets < counts[:, None]
        if self._text is not None:
            self._text.append(tokens, positions, wanted)
        return positions, self.ring.claim(positions, wanted)

    def _forward(self, state: DecodeState, levels: list[_Level], plan: AttentionPlan) -> Tensor:
        """Hidden states [B, n, E] of the last level. The root's own KV is in the ring already."""
        assert self.ring is not None
        level, depth = levels[-1], len(levels) - 1
        first = sum(one.tokens.shape[1] for one in levels[:-1])
        positions = (state.cache.lengths + depth)[:, None].expand_as(level.tokens)
        nodes = None
        if depth:
            nodes = ancestors(torch.cat([one.parents for one in levels], 1))[:, first:]
            nodes[:, :, 0] = False  # the root is seen in the ring
        sees = self.ring.sees(positions, nodes)
        x, feature = F.embedding(level.tokens, state.target.embedding), state.feature[:, None]
        attention = _RingAttention(
            state.target.attention,
            self.ring,
            sees,
            first if depth else None,
            state.cache,
            self._layers,
            plan,
        )
        lags = torch.tensor([depth + 1], device=x.device)
        return self._draft(x, state.target.rope(positions), attention, feature, lags)

    def _best_level(self, state: DecodeState, levels: list[_Level], logits: Tensor, depth: int) -> _Level:
        """The best children of the last level's nodes, chosen across the whole level."""
        token_ids = self._words.token_ids
        if not state.sampling.greedy:
            # The noise that the target's choice will have: what it makes likely there, it makes likely here.
            noise = gumbel(state.seeds, state.cache.lengths + depth + 1, token_ids)
            logits = logits / state.sampling.temperature + noise[:, None].float()
        first = sum(one.tokens.shape[1] for one in levels[:-1])
        indices, parents, scores = best_of_level(logits, levels[-1].scores, self._shape[depth])
        return _Level(token_ids[indices], first + parents, scores)

    def _drawn_level(
        self, state: DecodeState, levels: list[_Level], logits: Tensor, depth: int
    ) -> tuple[_Level, Tensor]:
        """The same number of children for each node, drawn from the draft's distribution."""
        last = levels[-1]
        B, n = last.tokens.shape
        whole = logits
        if self._head.vocab_ids is not None:
            size = state.target.config.vocab_size
            whole = logits.new_full((B, n, size), -torch.inf)
            whole[:, :, self._words.token_ids] = logits
        # The repetition penalty depends on a node's own path; without it q is only a little less alike to p.
        settings = state.sampling.without_penalty()
        q = filtered(whole.nan_to_num(0.0, posinf=0.0), settings).softmax(-1)
        first = sum(one.tokens.shape[1] for one in levels[:-1])
        nodes = torch.arange(first, first + n, device=q.device)
        count = max(1, self._shape[depth] // n)
        tokens, real = draw_children(q, count, state.seeds, state.cache.lengths + depth + 1, nodes)
        # One that was not drawn must look undrawable: it repeats the first child, which q has lost by then.
        tokens = torch.where(real, tokens, tokens[:, :, :1])
        parents = nodes.repeat_interleave(tokens.shape[2]).expand(B, -1)
        level = _Level(tokens.flatten(1), parents, last.scores.new_zeros(B, parents.shape[1]))
        return level, q


def _drawn_shape(wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The nodes per depth where each node has the same number of children, at least one."""
    widths = [1]
    for width in wanted:
        widths.append(widths[-1] * max(1, width // widths[-1]))
    return tuple(widths[1:])


@dataclass(frozen=True)
class _RingAttention:
    """The draft's attention while decoding: its ring and tree, and the target's prefix in place."""

    backend: Attention
    ring: DraftCache
    sees: Tensor
    first: int | None
    """Where in the tree the new nodes go; None for the root, whose KV is in the ring."""
    cache: KVCache
    layers: tuple[int, ...]
    plan: AttentionPlan

    def attend_self(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `DraftAttention.attend_self`."""
        if self.first is not None:
            self.ring.put_nodes(self.first, k, v)
        return self.backend.masked(q, self.ring.keys, self.ring.values, self.sees)[0]

    def attend_cross(self, index: int, q: Tensor) -> Tensor:
        """See `DraftAttention.attend_cross`. Every node of a round lags so far as to see all the prefix."""
        return self.backend.prefix(q, *self.cache.layer(self.layers[index]), self.plan)[0]


def best_of_level(logits: Tensor, scores: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best children of nodes with logits [B, n, V] and scores [B, n]: index, node and score, [B, w]."""
    # A draft that computes nan proposes nonsense, which is allowed; the order of its nodes must hold.
    best = F.log_softmax(logits, -1).nan_to_num(-torch.inf).topk(min(width, logits.shape[-1]), -1)
    total = (scores[:, :, None] + best.values).flatten(1)
    top = total.topk(min(width, total.shape[1]), -1)
    parents = top.indices // best.indices.shape[-1]
    return best.indices.flatten(1).gather(1, top.indices), parents, top.values
