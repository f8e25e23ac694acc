"""Check that a target on several devices says the same words as on one device. It takes about a minute.

It answers a few prompts by every method in one process, then with --tensor-parallel ranks, and compares the
words and the speed. At the end it kills a rank, and shows what is told. With two GPUs:

  python -m benchmarks.check_tensor_parallel
  python -m benchmarks.check_tensor_parallel --target qwq --dtype bfloat16
  python -m benchmarks.check_tensor_parallel --device cuda:0,cuda:0        two processes on one GPU, by gloo
  python -m benchmarks.check_tensor_parallel --device cpu --ranks 4
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

from benchmarks.shapes import write_random_pair
from longspec import LongSpec, UserError
from longspec.config import DraftConfig
from longspec.engine.ranks import RankError
from longspec.hub import DEFAULT_TARGET, resolve

METHODS = ("vanilla", "seq", "tree", "lookup", "magicdec")
TEXTS = ("Why is the sky blue?", "Say three times: red lorry, yellow lorry.", "Name the months of the year.")
# A random target has so many tokens; prompts name some of them.
_VOCAB = 1003
Answers = dict[str, list[list[int]]]


def random_pair(folder: Path) -> tuple[str, str]:
    """A random target of 8 KV heads and a draft for it."""
    config = Qwen2Config(
        vocab_size=_VOCAB,
        hidden_size=1024,
        intermediate_size=2304,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        initializer_range=0.05,
    )
    draft = DraftConfig(cross_layers=(-1, 0), use_feature=True, max_lag=5)
    made = write_random_pair(folder, resolve(DEFAULT_TARGET).folder, config, draft)
    return str(made[0]), str(made[1])


def load(models: tuple[str, str | None], device: str, dtype: str, ranks: int) -> LongSpec:
    first = device if ranks > 1 else device.split(",")[0]
    return LongSpec.from_pretrained(
        *models,
        device=first,
        dtype=dtype,
        tensor_parallel=ranks,
        calibrate=False,
        max_rows=4,
        max_length=1024,
    )


def answers(model: LongSpec, prompts: list[Any]) -> tuple[Answers, dict[str, float]]:
    """The tokens of each method, greedy and sampled, and tokens per second."""
    words, speeds = {}, {}
    for method in METHODS:
        for temperature in (0.0, 0.8):
            options: Any = {"method": method, "temperature": temperature, "seed": 7, "eos_ids": ()}
            model.generate(prompts, max_new_tokens=4, **options)  # sets up kernels
            began = time.perf_counter()
            found = model.generate(prompts, max_new_tokens=32, **options)
            name = f"{method} at {temperature}"
            speeds[name] = sum(one.tokens for one in found) / (time.perf_counter() - began)
            words[name] = [one.token_ids for one in found]
    return words, speeds


def lose_a_rank(model: LongSpec, prompt: Any) -> tuple[str, float]:
    """Kill the last rank in the middle of an answer: what is told, and after how many seconds."""
    assert model.engine.device.ranks is not None
    stream = model.stream(prompt, max_new_tokens=900, method="vanilla", eos_ids=())
    next(stream)
    os.kill(model.engine.device.ranks.process_ids[-1], signal.SIGKILL)
    began = time.perf_counter()
    try:
        list(stream)
    except RankError as error:
        return str(error), time.perf_counter() - began
    raise AssertionError("a rank was killed, and nobody noticed")


def check(device: str, ranks: int, dtype: str, target: str | None, folder: Path) -> bool:
    """Print the comparison; whether all words were the same."""
    models: tuple[str, str | None] = (target, None) if target else random_pair(folder)
    prompts: list[Any] = list(TEXTS)
    if target is None:
        prompts = [[(7 * place * place + 31 * row) % _VOCAB for place in range(40)] for row in range(3)]
    alone = load(models, device, dtype, 1)
    expected, before = answers(alone, prompts)
    del alone
    shared = load(models, device, dtype, ranks)
    words, after = answers(shared, prompts)
    on_gpu = shared.target.device.type == "cuda"
    print(
        f"{ranks} ranks on {', '.join(map(str, shared.engine.device.ranks.devices))} by "  # type: ignore[union-attr]
        f"{torch.distributed.get_backend()}, rounds captured: {shared.engine.device.captures}"
        + (f"; {torch.cuda.get_device_name(shared.target.device)}" if on_gpu else "")
    )
    for name, found in words.items():
        same = sum(one == other for one, other in zip(found, expected[name], strict=True))
        print(
            f"  {name:16} {same} of {len(found)} answers the same; "
            f"{before[name]:7.1f} tokens/s alone, {after[name]:7.1f} with {ranks} ranks"
        )
    told, seconds = lose_a_rank(shared, prompts[0])
    print(f"  a killed rank is told after {seconds:.1f} s: {told}")
    shared.close()
    return words == expected


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="as --device of longspec generate")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="how many processes (%(default)s)")
    parser.add_argument("--dtype", default="float32", help="in half precision words may part (%(default)s)")
    parser.add_argument("--target", help="a model with its own draft (default: random weights)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            same = check(given.device, given.ranks, given.dtype, given.target, Path(folder))
        except (UserError, RankError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    print("all words are the same" if same else "some words differ")
    return 0 if same or given.dtype != "float32" else 1


if __name__ == "__main__":
    sys.exit(main())
