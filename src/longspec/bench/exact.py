"""Whether a method said what vanilla says, and how close the call was where it did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longspec.api import LongSpec
from longspec.attention import AttentionPlan
from longspec.cache import Pages
from longspec.decoding.choose import SamplingRows, filtered, gumbel
from longspec.decoding.sampling import Sampling
from longspec.engine.engine import on_device
from longspec.engine.loop import PLAIN_ALONE
from longspec.models.passes import paged_pass


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The place of the first token that differs; None where there is none."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return place
    return min(len(ours), len(theirs)) if len(ours) != len(theirs) else None


def describe_difference(
    model: LongSpec,
    prompt: list[int],
    vanilla: list[int],
    other: list[int],
    place: int,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """The tokens there, by how much the target prefers vanilla's, and what one rounding is, in logits.

    A margin no larger than the type's rounding means a tie, which either may win; a large one, a fault.
    When sampling, the seed's noise counts too, at the temperature's scale. Both come from a fresh pass.
    """
    found: dict[str, Any] = {
        **{"place": place, "vanilla": None, "other": None},
        **{"margin": None, "rounding": None},
    }
    if place >= min(len(vanilla), len(other)):
        return found  # one of the two merely went on
    found |= {"vanilla": vanilla[place], "other": other[place]}
    sampling = replace(model.defaults, temperature=temperature)
    text = [*prompt, *vanilla[:place]]
    logits = next_logits(model, text)
    scores = choice_scores(logits, text, sampling, seed)
    best, second = scores[vanilla[place]], scores[other[place]]
    margin = float(best - second) * (temperature or 1.0)
    # None where a filter such as top-k lets only one of the two through: no number says how close that was.
    found["margin"] = margin if abs(margin) != float("inf") and margin == margin else None
    found["rounding"] = torch.finfo(model.target.dtype).eps * float(logits.abs().max())
    return found


@torch.inference_mode()
def next_logits(model: LongSpec, text: list[int]) -> Tensor:
    """The target's logits [1, V] for the token that follows the text, by a fresh pass over it."""
    target, models = model.target, model.engine.models
    size, config = models.pages.size, target.config
    numbers = list(range(1, -(-len(text) // size) + 1))
    with on_device(target.device):
        kv = Pages.empty(config, len(numbers), size, target.device, target.dtype)
        table = torch.tensor([numbers], dtype=torch.int32, device=target.device)
        for start in range(0, len(text), PLAIN_ALONE):
            tokens = torch.tensor([text[start : start + PLAIN_ALONE]], device=target.device)
            count = tokens.shape[1]
            positions = torch.arange(start, start + count, device=target.device)[None]
            lengths = torch.tensor([start], device=target.device)
            plan = AttentionPlan(lengths, table, size, count, known=([start], [numbers]))
            places = kv.places(table, positions)
            hidden = target(tokens, paged_pass(target, kv, positions, places, plan, models.fused))
        return target.logits(hidden[:, -1])


@torch.inference_mode()
def choice_scores(logits: Tensor, text: list[int], sampling: Sampling, seed: int) -> Tensor:
    """What `choose` takes the largest of, [V], where the text is followed by a token with these logits."""
    device = logits.device
    # Of a greedy row `filtered` leaves the best token alone: at temperature 1 the others keep their scores.
    warm = replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) if sampling.greedy else sampling
    rows = SamplingRows.of([warm], logits.shape[-1], device)
    rows.seen[0, torch.tensor(text, device=device)] = True
    scores = filtered(logits, rows).double()
    if not sampling.greedy:
        seeds = torch.tensor([seed], device=device)
        tokens = torch.arange(scores.shape[-1], device=device)
        scores = scores + gumbel(seeds, torch.full_like(seeds, len(text)), tokens)
    return scores[0]
