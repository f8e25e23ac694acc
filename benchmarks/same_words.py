"""How many answers differ from vanilla's: by each method, alone and beside other answers.

python -m benchmarks.same_words --prompts FILE --exact             real weights, one "prompt" a line
python -m benchmarks.same_words --shape llama3-8b --length 4096 --exact   random weights, 20 random prompts
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from benchmarks.shapes import random_draft, random_target, shape_named
from longspec import LongSpec
from longspec.attention import choose_backend
from longspec.cli.arguments import add_kv_dtype
from longspec.config import DraftConfig
from longspec.decoding.methods import Lookup, MethodChoice, Seq, Tree, Vanilla
from longspec.decoding.sampling import Sampling
from longspec.engine.engine import Engine
from longspec.engine.make import make_engine
from longspec.engine.sequence import Sequence
from longspec.models.layers import replace_linears
from longspec.models.native_linears import packed
from longspec.models.placement import pick_device, pick_dtype
from longspec.models.weights import Precision, with_kv_dtype

METHODS: dict[str, MethodChoice] = {
    "vanilla": Vanilla(),
    "tree": Tree(max_nodes=64, num_lookup=0),
    "tree with copying": Tree(max_nodes=64),
    "chain": Seq(),
    "lookup": Lookup(),
}


@dataclass(frozen=True)
class Count:
    """One method at one temperature, with so many rows at once."""

    method: str
    temperature: float
    rows: int
    answers: int
    differ: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Asked:
    """What is asked, and of whom."""

    engine: Engine
    prompts: list[list[int]]
    eos_ids: frozenset[int]
    max_tokens: int

    def answers(self, method: MethodChoice, temperature: float, rows: int) -> list[list[int]]:
        """Each prompt's answer; its seed is its number. Nothing is kept from one group for the next."""
        sequences = [
            Sequence(prompt, self.max_tokens, Sampling(temperature), number, self.eos_ids, method)
            for number, prompt in enumerate(self.prompts)
        ]
        for start in range(0, len(sequences), rows):
            self.engine.run(sequences[start : start + rows])
            self.engine.forget()
        return [sequence.tokens for sequence in sequences]


def main() -> int:
    """Count, and print a line after each combination."""
    arguments = _parser().parse_args()
    asked = _random(arguments) if arguments.shape else _real(arguments)
    print(
        f"{len(asked.prompts)} prompts, {arguments.max_tokens} tokens, exact: {arguments.exact}, "
        f"KV: {arguments.kv_dtype}",
        flush=True,
    )
    for count in _counts(asked, arguments.temperature, arguments.rows, arguments.methods):
        print(json.dumps(asdict(count)), flush=True)
    return 0


def _counts(asked: Asked, temperatures: list[float], rows: list[int], methods: list[str]) -> Iterator[Count]:
    for temperature in temperatures:
        vanilla: list[list[int]] = []
        for num_rows, name in product(rows, methods):
            started = time.perf_counter()
            said = asked.answers(METHODS[name], temperature, num_rows)
            seconds = round(time.perf_counter() - started, 1)
            vanilla = vanilla or said
            differ = sum(one != other for one, other in zip(said, vanilla, strict=True))
            yield Count(name, temperature, num_rows, len(said), differ, sum(map(len, said)), seconds)


def _real(arguments: argparse.Namespace) -> Asked:
    model = LongSpec.from_pretrained(
        arguments.target,
        max_rows=max(arguments.rows),
        exact=arguments.exact,
        kv_dtype=arguments.kv_dtype,
        calibrate=False,
    )
    lines = Path(arguments.prompts).read_text().splitlines()[: arguments.limit]
    size = model.target.config.vocab_size
    prompts = [model.encoder.encode(json.loads(line)["prompt"], False, size) for line in lines]
    return Asked(model.engine, prompts, model.eos_ids, arguments.max_tokens)


def _random(arguments: argparse.Namespace) -> Asked:
    device = pick_device("auto")
    config, dtype = shape_named(arguments.shape), pick_dtype("auto", device)
    target = random_target(config, device, dtype)
    target.attention = choose_backend("auto")
    replace_linears(target, packed)
    precision = Precision(dtype)
    target.precision = with_kv_dtype(precision, arguments.kv_dtype, config.head_dim, device, target.attention)
    drafting = random_draft(target, DraftConfig())
    engine = make_engine(
        target, *drafting, max_length=arguments.length + arguments.max_tokens + 64,
        max_rows=max(arguments.rows), exact=arguments.exact,
    )  # fmt: skip
    dice = random.Random(0)
    # A text that repeats itself, so that there is something to copy.
    prompts = [
        (dice.choices(range(config.vocab_size), k=256) * (arguments.length // 256 + 1))[: arguments.length]
        for _ in range(arguments.limit or 20)
    ]
    return Asked(engine, prompts, frozenset(), arguments.max_tokens)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="with its own draft")
    parser.add_argument("--prompts", help='a file of JSON lines with "prompt"')
    parser.add_argument("--shape", help="random weights of this shape instead")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a random prompt")
    parser.add_argument("--limit", type=int, help="the first so many prompts")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 16], help="at once; the first is compared with"
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--exact", action="store_true")
    add_kv_dtype(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
