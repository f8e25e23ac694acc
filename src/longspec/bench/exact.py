"""Whether a method said what vanilla says, and how close the call was where it did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from longspec.api import LongSpec
from longspec.decoding.choose import Sampling, filtered, gumbel
from longspec.decoding.loop import PREFILL_CHUNK


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
    """The tokens there, and by how much the target prefers vanilla's, in logits.

    A margin about as small as the type's rounding means a tie, which either may win; a large one, a fault.
    Sampling, the seed's noise counts too, at the temperature's scale. A fresh pass over the text tells.
    """
    found: dict[str, Any] = {"place": place, "vanilla": None, "other": None, "margin": None}
    if place >= min(len(vanilla), len(other)):
        return found  # one of the two merely went on
    found |= {"vanilla": vanilla[place], "other": other[place]}
    sampling = replace(model.engine.defaults, temperature=temperature)
    scores = choice_scores(model, [*prompt, *vanilla[:place]], sampling, seed)
    best, second = scores[vanilla[place]], scores[other[place]]
    margin = float(best - second) * (temperature or 1.0)
    # None where a filter such as top-k lets only one of the two through: no number says how close that was.
    found["margin"] = margin if abs(margin) != float("inf") and margin == margin else None
    return found


@torch.inference_mode()
def choice_scores(model: LongSpec, text: list[int], sampling: Sampling, seed: int) -> torch.Tensor:
    """What `choose` takes the largest of, [V], for the token that follows the text."""
    target = model.engine.target
    cache = target.new_cache(1, len(text))
    for piece in torch.tensor(text, device=target.device).split(PREFILL_CHUNK):
        hidden = target(piece[None], cache)
        cache.advance(len(piece))
    seen = None
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(1, target.config.vocab_size, dtype=torch.bool, device=target.device)
        seen[0, torch.tensor(text, device=target.device)] = True
    scores = filtered(target.logits(hidden[:, -1]), sampling, seen).double()
    if not sampling.greedy:
        seeds = torch.tensor([seed], device=target.device)
        tokens = torch.arange(scores.shape[-1], device=target.device)
        scores = scores + gumbel(seeds, torch.full_like(seeds, len(text)), tokens)
    return scores[0]
