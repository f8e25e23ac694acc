"""Lookup: where a text repeats itself, what followed last time is proposed again.

Tokens that were looked up compete with drafted ones by their scores, which are what lookup was found to be
worth: the longer the run of tokens that stood there before, the likelier is what followed. In answers of
SmolLM2 to instructions, programming tasks and passages to summarise, the first token was right in 0.42 of
the cases after a run of 2, 0.7 after 3, 0.8 after 4 and 0.95 after 8, and each further one in 0.75 to 0.96.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longspec.decoding.tree import TokenTree

# Runs of tokens that are looked for.
LEAST, MOST = 2, 8
# A token is taken to be right with 1 - DOUBT / run^2, if it is the first, or with 1 - FADE / run.
DOUBT, FADE = 2.3, 0.45


def find(text: Tensor, ends: Tensor, least: int = LEAST, most: int = MOST) -> tuple[Tensor, Tensor]:
    """Where the longest run of tokens before `ends` [B] of the texts [B, S] stood before, the newest such
    place: what followed it begins there.

    Returned are the run's length, at most `most` and 0 where it is below `least`, and the place, [B].
    """
    place = torch.arange(text.shape[1], device=ends.device)
    alike = place < ends[:, None]
    runs = torch.zeros_like(text)
    for back in range(1, most + 1):
        last = text.gather(1, (ends - back).clamp(min=0)[:, None])
        alike = alike & (place >= back) & (text.roll(back, 1) == last)
        runs += alike
    runs = torch.where(runs >= least, runs, 0)
    best = (runs * text.shape[1] + place).argmax(1, keepdim=True)
    return runs.gather(1, best)[:, 0], best[:, 0]


def graft(
    tree: TokenTree, scores: Tensor, text: Tensor, ends: Tensor, num_lookup: int, found: tuple[Tensor, Tensor]
) -> tuple[TokenTree, Tensor]:
    """The tree with a looked-up branch of up to `num_lookup` nodes, and the scores [B, N + num_lookup].

    As far as the tree has the tokens already, its own nodes are worth as much; where it does not go on, there
    is a place for each of the others. What is not used of these is the worst of all. Each text [B, S] ends
    before `ends` [B] with the root; `found` is what `find` returned.
    """
    runs, begins = found
    hit, period = runs > 0, (ends - begins).clamp(min=1)
    node = torch.zeros_like(ends)
    score = torch.zeros(len(ends), device=scores.device)
    inside = torch.arange(tree.num_nodes, device=ends.device) > 0  # the root is nobody's child
    added: list[tuple[Tensor, Tensor, Tensor]] = []
    for step in range(num_lookup):
        # Behind the text's end it goes on with what was just looked up: a loop goes on as a loop.
        token = text.gather(1, (begins + step % period)[:, None])
        chance = 1 - (DOUBT / runs**2 if step == 0 else FADE / runs)
        score = score + torch.where(hit, chance.clamp(min=0.01).log(), -math.inf).float()
        same = (tree.parents == node[:, None]) & (tree.tokens == token) & inside & hit[:, None]
        there, child = same.any(1), same.long().argmax(1)
        scores = torch.where(same, torch.maximum(scores, score[:, None]), scores)
        new = hit & ~there
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
