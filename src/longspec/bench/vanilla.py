"""Vanilla decoding against `transformers`, the same model, threads and prompt, taking turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspec.api import LongSpec
from longspec.models.placement import device_name

# Text of no importance, repeated to any length.
_SENTENCE = "The quick brown fox jumps over the lazy dog while the rain keeps falling on the old roof. "


@dataclass(frozen=True)
class Timing:
    """Seconds of one prefill and of one decoded token: the median over repeats, and the spread."""

    prefill: float
    token: float
    token_least: float
    token_most: float


@dataclass(frozen=True)
class Comparison:
    """Both engines in one run."""

    ours: Timing
    theirs: Timing
    context: int
    new_tokens: int
    same_tokens: bool
    environment: dict[str, Any]

    @property
    def decode_ratio(self) -> float:
        """How many times as many tokens per second ours decodes."""
        return self.theirs.token / self.ours.token

    @property
    def prefill_ratio(self) -> float:
        """How many times as fast ours prefills."""
        return self.theirs.prefill / self.ours.prefill


def compare(
    model: LongSpec,
    folder: Path,
    context: int,
    new_tokens: int,
    repeats: int,
    on_repeat: Callable[[int], None] = lambda number: None,
) -> Comparison:
    """Time `repeats` generations of each engine, alternating, after one untimed warm-up of each.

    `folder` is where the model came from, for transformers to load too.
    """
    sentence = model.tokenizer(_SENTENCE, add_special_tokens=False)["input_ids"]
    ids = (sentence * (context // len(sentence) + 1))[:context]
    engines = (_ours(model, ids, new_tokens), _transformers(folder, model, ids, new_tokens))
    outputs = [run()[0] for run in engines]
    times: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for _ in range(repeats):
        for run, timed in zip(engines, times, strict=True):
            gc.collect()
            _, prefill, total = run()
            timed.append((prefill, (total - prefill) / (new_tokens - 1)))
        on_repeat(1)
    ours, theirs = (_timing(timed) for timed in times)
    environment = {
        "target": model.name,
        "dtype": str(model.target.dtype).removeprefix("torch."),
        "device": str(model.target.device),
        "threads": torch.get_num_threads(),
        "processor": device_name(model.target.device),
        "torch": torch.__version__,
    }
    return Comparison(ours, theirs, len(ids), new_tokens, outputs[0] == outputs[1], environment)


_Run = Callable[[], tuple[list[int], float, float]]
"""Runs one generation; returns its tokens, the prefill's seconds and all of them."""


def _ours(model: LongSpec, ids: list[int], new_tokens: int) -> _Run:
    def run() -> tuple[list[int], float, float]:
        model.reset()
        # Both engines must make the same number of tokens, so neither stops at an eos.
        result = model.generate(ids, max_new_tokens=new_tokens, temperature=0.0, eos_ids=(), method="vanilla")
        return result.token_ids, result.prefill_seconds, result.seconds

    return run


def _transformers(folder: Path, model: LongSpec, ids: list[int], new_tokens: int) -> _Run:
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    engine = model.target
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=engine.dtype).eval()
    theirs: Any = loaded.to(engine.device)
    theirs.generation_config.eos_token_id = None
    prompt = torch.tensor([ids], device=engine.device)

    class Clock(BaseStreamer):
        """Notes when the first new token comes; the prompt comes first."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run() -> tuple[list[int], float, float]:
        clock = Clock()
        started = time.perf_counter()
        with torch.inference_mode():
            output = theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=clock,
            )
        total = time.perf_counter() - started
        return output[0, len(ids) :].tolist(), clock.times[1] - started, total

    return run


def _timing(timed: list[tuple[float, float]]) -> Timing:
    tokens = [token for _, token in timed]
    prefill = statistics.median(prefill for prefill, _ in timed)
    return Timing(prefill, statistics.median(tokens), min(tokens), max(tokens))
