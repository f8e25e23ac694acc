"""Whether a method said what vanilla says, and how close the call was where it did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

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
    """The tokens there, by how much the target prefers vanilla's, and what one rounding is, in logits.

    A margin no larger than the type's rounding means a tie, which either may win; a large one, a fault.
    Sampling, the seed's noise counts too, at the temperature's scale. A fresh pass over the text tells.
    """
    found: dict[str, Any] = {
        **{"place": place, "vanilla": None, "other": None},
        **{"margin": None, "rounding": None},
    }
    if place >= min(len(vanilla), len(other)):
        return found  # one of the two merely went on
    found |= {"vanilla": vanilla[place], "other": other[place]}
    sampling = replace(model.engine.defaults, temperature=temperature)
    text = [*prompt, *vanilla[:place]]
    logits = next_logits(model, text)
    scores = choice_scores(logits, text, sampling, seed)
    best, second = scores[vanilla[place]], scores[other[place]]
    margin = float(best - second) * (temperature or 1.0)
    # None where a filter such as top-k lets only one of the two through: no number says how close that was.
    found["margin"] = margin if abs(margin) != float("inf") and margin == margin else None
    found["rounding"] = torch.finfo(model.engine.target.dtype).eps * float(logits.abs().max())
    return found


@torch.inference_mode()
def next_logits(model: LongSpec, text: list[int]) -> Tensor:
    """The target's logits [1, V] for the token that follows the text, by a fresh pass over it."""
    target = model.engine.target
    cache = target.new_cache(1, len(text))
    for piece in torch.tensor(text, device=target.device).split(PREFILL_CHUNK):
        hidden = target(piece[None], cache)
        cache.advance(len(piece))
    return target.logits(hidden[:, -1])


@torch.inference_mode()
def choice_scores(logits: Tensor, text: list[int], sampling: Sampling, seed: int) -> Tensor:
    """What `choose` takes the largest of, [V], where the text is followed by a token with these logits."""
    device = logits.device
    seen = None
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=device)
        seen[0, torch.tensor(text, device=device)] = True
    scores = filtered(logits, sampling, seen).double()
    if not sampling.greedy:
        seeds = torch.tensor([seed], device=device)
        tokens = torch.arange(scores.shape[-1], device=device)
        scores = scores + gumbel(seeds, torch.full_like(seeds, len(text)), tokens)
    return scores[0]
