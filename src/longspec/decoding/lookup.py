"""Lookup: where a text repeats itself, the tokens that followed last time are proposed again.

Looked-up tokens compete with drafted ones by score. The score is the log of the measured chance that they
are accepted (see `longspec.decoding.expected`). The chance grows with the run of tokens that matched.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longspec.decoding.expected import FIRST_DOUBT, MAX_RUN, MIN_RUN, NEXT_DOUBT
from longspec.decoding.native_round import find_runs, has_code
from longspec.decoding.tree import TokenTree


def find(text: Tensor, ends: Tensor, min_run: int = MIN_RUN, max_run: int = MAX_RUN) -> tuple[Tensor, Tensor]:
    """Find where the last tokens before `ends` [B] of the texts [B, S] occurred earlier: the place with the
    longest run of equal tokens, and of several such places the newest.

    Returns the run's length, at most `max_run`, and 0 if it is below `min_run`; and the index of the token
    that followed the run there. Both are [B].
    """
    if has_code(text):
        return find_runs(text, ends, min_run, max_run)
    size = int(ends.max())
    text = text[:, :size]
    is_match = torch.arange(size, device=ends.device)[min_run:] < ends[:, None]
    for back in range(1, min_run + 1):
        last = text.gather(1, (ends - back).clamp(min=0)[:, None])
        is_match &= text[:, min_run - back : size - back] == last
    # Few places match in `min_run` tokens. Only there, compare longer runs.
    rows, places = is_match.nonzero(as_tuple=True)
    places = places + min_run
    backs = torch.arange(1, max_run + 1, device=ends.device)
    before, last = places[:, None] - backs, ends[rows][:, None] - backs
    equal = text[rows[:, None], before.clamp(min=0)] == text[rows[:, None], last.clamp(min=0)]
    equal &= before >= 0
    found = torch.zeros_like(ends)
    found.scatter_reduce_(0, rows, equal.cumprod(1).sum(1) * size + places, "amax")
    return found // size, found % size


def graft(
    tree: TokenTree, scores: Tensor, text: Tensor, ends: Tensor, num_lookup: int, found: tuple[Tensor, Tensor]
) -> tuple[TokenTree, Tensor]:
    """Add a looked-up branch of `num_lookup` nodes; returns the tree and its scores [B, N + num_lookup].

    Where the tree has a looked-up token already, its own node gets the better of the two scores, and the
    added node is unused: its score is -inf. Each text [B, S] ends before `ends` [B], with the root. `found`
    is the result of `find`.
    """
    runs, starts = found
    has_match, period = runs > 0, (ends - starts).clamp(min=1)
    node = torch.zeros_like(ends)
    score = torch.zeros(len(ends), dtype=torch.float32, device=scores.device)
    is_child = torch.arange(tree.num_nodes, device=ends.device) > 0  # all but the root
    added: list[tuple[Tensor, Tensor, Tensor]] = []
    for step in range(num_lookup):
        # After the end of the text the branch continues with its own tokens, so that a loop stays a loop.
        token = text.gather(1, (starts + step % period)[:, None])
        chance = 1 - (FIRST_DOUBT / runs**2 if step == 0 else NEXT_DOUBT / runs)
        score = score + torch.where(has_match, chance.clamp(min=0.01).log(), -math.inf).float()
        same = (tree.parents == node[:, None]) & (tree.tokens == token) & is_child & has_match[:, None]
        there, child = same.any(1), same.long().argmax(1)
        scores = torch.where(same, torch.maximum(scores, score[:, None]), scores)
        new = has_match & ~there
        added.append(
            (
                torch.where(new, token[:, 0], tree.tokens[:, 0]),
                torch.where(new, node, 0),
                torch.where(new, score, -math.inf),
            )
        )
        node = torch.where(there, child, torch.where(new, tree.num_nodes + step, node))
    more_tokens, more_parents, more_scores = (torch.stack(part, 1) for part in zip(*added, strict=True))
    grown = TokenTree(torch.cat((tree.tokens, more_tokens), 1), torch.cat((tree.parents, more_parents), 1))
    return grown, torch.cat((scores, more_scores), 1)
