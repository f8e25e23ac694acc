"""`transformers` on the same prompts in the same run: plain, compiled, with its own speculation."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longspec.api import LongSpec
from longspec.bench.runners import TimedAnswer
from longspec.errors import UserError, reason_of


class _Clock:
    """A streamer that notes when tokens come. The first entry is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


class Transformers:
    """One way to call `generate`. Times are taken as ours are: the first token ends the prefill."""

    same_when_sampled = False

    def __init__(self, label: str, theirs: Any, model: LongSpec, options: dict[str, Any]) -> None:
        self.label = label
        self._theirs, self._model, self._options = theirs, model, options

    def answers(
        self, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> list[TimedAnswer]:
        return [
            self._answer(prompt, max_new_tokens, temperature, seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def _answer(self, prompt: list[int], max_new_tokens: int, temperature: float, seed: int) -> TimedAnswer:
        """No KV is kept between turns, so the whole prompt is read again."""
        device = self._model.target.device
        ids = torch.tensor([prompt], device=device)
        clock = _Clock()
        torch.manual_seed(seed)
        sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            sampling["temperature"] = temperature
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(self._model.eos_ids),
                pad_token_id=0,
                streamer=clock,
                **sampling,
                **self._options,
            )
        tokens = output[0, len(prompt) :].tolist()
        total = time.perf_counter() - started
        prefill = clock.times[1] - started
        ended = bool(tokens) and tokens[-1] in self._model.eos_ids
        # Speculating, it emits several at once; those that came with the prefill were not decoded.
        first = min(clock.counts[1], len(tokens))
        reason = "eos" if ended else "length"
        return TimedAnswer(self.label, tokens, first, prefill, total - prefill, None, None, reason)

    def forget(self) -> None:
        pass  # nothing is kept


class _Static(Transformers):
    """Static cache and compiled decoding steps.

    A step takes longer with a longer cache, and each length is compiled separately. So lengths are rounded
    up, by at most a quarter, and a new length is compiled before anything is timed.
    """

    def __init__(self, theirs: Any, model: LongSpec) -> None:
        from transformers import CompileConfig

        compiling: Any = CompileConfig(dynamic=False)
        compiling._compile_all_devices = True  # else a CPU is skipped
        super().__init__("hf-static", theirs, model, {"compile_config": compiling})
        self._caches: dict[int, Any] = {}

    def _answer(self, prompt: list[int], max_new_tokens: int, temperature: float, seed: int) -> TimedAnswer:
        from torch._dynamo import config
        from transformers.cache_utils import StaticCache

        length = _rounded(len(prompt) + max_new_tokens)
        fresh = length not in self._caches
        if fresh:
            self._caches[length] = StaticCache(config=self._theirs.config, max_cache_len=length)
        self._options["past_key_values"] = self._caches[length]
        with config.patch(recompile_limit=64):  # by default the ninth length would not be compiled
            if fresh:
                # Twice: one call compiles, the next may record a graph.
                for _ in range(2):
                    super()._answer(prompt, min(4, max_new_tokens), temperature, seed)
                    self._empty(length)
            self._empty(length)
            return super()._answer(prompt, max_new_tokens, temperature, seed)

    def _empty(self, length: int) -> None:
        with torch.inference_mode():  # in which its tensors were made
            self._caches[length].reset()


def _rounded(length: int) -> int:
    unit = max(256, 2 ** (length.bit_length() - 3))
    return -(-length // unit) * unit


def baselines(
    model: LongSpec, folder: Path, assistant: Path | None
) -> tuple[list[Transformers], dict[str, str]]:
    """Every way that works here, and the reason why each of the others does not.

    `folder` is where the target came from.
    """
    theirs = _load(folder, model)
    found = [Transformers("hf", theirs, model, {})]
    missing = {}
    if model.target.device.type == "cpu" and not shutil.which("g++"):
        missing["hf-static"] = "torch.compile needs a C++ compiler on a CPU: install g++"
    else:
        # One of its own: compiling changes the model it is done to.
        found.append(_Static(_load(folder, model), model))
    found.append(Transformers("hf-lookup", theirs, model, {"prompt_lookup_num_tokens": 10}))
    if assistant is None:
        missing["hf-assisted"] = "name a smaller model of the same vocabulary: --assistant MODEL"
    else:
        options = {"assistant_model": _load(assistant, model)}
        found.append(Transformers("hf-assisted", theirs, model, options))
    return found, missing


def _load(folder: Path, model: LongSpec) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # the run has one of its own
    target = model.target
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype)
    except (OSError, ValueError) as error:
        raise UserError(f"transformers cannot load {folder}: {reason_of(error)}") from error
    return loaded.eval().to(target.device)
