"""Which parts of the prompts the next pass computes."""

from __future__ import annotations

from itertools import islice

from longspec.config import ModelConfig
from longspec.decoding.round import Models
from longspec.engine.device import PromptPart
from longspec.engine.fill import MOST_SEGMENTS, SEGMENT
from longspec.engine.memory import longest_chunk
from longspec.engine.scheduler import Seat

# Tokens of a prompt that are computed at a time: alone (less if memory is short), and beside running rows.
ALONE, BESIDE = 32768, 2048
PLAIN_ALONE, PLAIN_BESIDE = 2048, 256


def exact_grid(models: Models) -> int:
    """Tokens of the chunks in which prompts are always computed, if exact rounds need that; else 0.

    Large models compute long prompts with libraries, whose sums depend on the shape of a chunk.
    """
    return BESIDE if models.exact and is_large(models.target.config) else 0


def is_large(config: ModelConfig) -> bool:
    """Whether computing a chunk takes longer than launching it, which takes about 0.6 ms a layer."""
    return 2 * BESIDE * config.num_parameters / 6e14 > 6e-4 * config.num_layers


class Chunks:
    """Divides prompts: a long part of one, or segments of several together."""

    def __init__(self, models: Models) -> None:
        self._models = models
        target = models.target
        self._longest = longest_chunk(target.config, target.dtype, target.device, BESIDE, ALONE)

    def parts(self, filling: list[Seat], alone: bool) -> list[tuple[Seat, PromptPart]]:
        """The next parts of these prompts; `alone`: no row waits for a round meanwhile."""
        first = filling[0]
        left = len(first.text) - first.computed
        if not self._models.fused:
            return [_part(first, first.computed, PLAIN_ALONE if alone else PLAIN_BESIDE)]
        if first.computed < first.num_chunked:
            return [_part(first, first.computed, BESIDE)]
        if left >= BESIDE and is_large(self._models.target.config) and not self._models.exact:
            return [_part(first, first.computed, self._longest if alone else BESIDE)]
        parts = (
            _part(seat, start, SEGMENT)
            for seat in filling
            for start in range(seat.computed, len(seat.text), SEGMENT)
        )
        return list(islice(parts, MOST_SEGMENTS))


def _part(seat: Seat, start: int, most: int) -> tuple[Seat, PromptPart]:
    count = min(most, len(seat.text) - start)
    return seat, PromptPart(seat.slot, start, count, start + count == len(seat.text), seat.pages)
