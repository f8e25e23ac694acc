"""Whether a method emitted vanilla's tokens, and how close the two choices were where it did not."""

from __future__ import annotations

import math
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
from longspec.engine.chunks import PLAIN_ALONE
from longspec.models.passes import paged_pass
from longspec.models.placement import on_device


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
    """The two tokens, by how many logits the target prefers vanilla's, and the size of a rounding error.

    A margin within the rounding is a tie, which either token may win; a larger margin is a fault. When
    sampling, the seed's noise counts too, scaled by the temperature. The logits come from a fresh pass.
    """
    found: dict[str, Any] = dict.fromkeys(("vanilla", "other", "margin", "rounding"))
    found["place"] = place
    if place >= min(len(vanilla), len(other)):
        return found  # one answer is the beginning of the other
    found |= {"vanilla": vanilla[place], "other": other[place]}
    sampling = replace(model.defaults, temperature=temperature)
    text = [*prompt, *vanilla[:place]]
    logits = next_logits(model, text)
    scores = choice_scores(logits, text, sampling, seed)
    best, second = scores[vanilla[place]], scores[other[place]]
    margin = float(best - second) * (temperature or 1.0)
    # None where a filter such as top-k removes one of the two: no number says how close they were.
    found["margin"] = margin if math.isfinite(margin) else None
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
    """The scores [V] of which `choose` takes the largest, for the token that follows the text."""
    device = logits.device
    # `filtered` keeps only the best token of a greedy row; at temperature 1 all tokens keep their scores.
    warm = replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) if sampling.greedy else sampling
    rows = SamplingRows.of([warm], logits.shape[-1], device)
    rows.seen[0, torch.tensor(text, device=device)] = True
    scores = filtered(logits, rows).double()
    if not sampling.greedy:
        seeds = torch.tensor([seed], device=device)
        tokens = torch.arange(scores.shape[-1], device=device)
        scores = scores + gumbel(seeds, torch.full_like(seeds, len(text)), tokens)
    return scores[0]
