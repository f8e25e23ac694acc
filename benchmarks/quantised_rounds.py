"""Steps and rounds by the type of the weights and of the KV, in one run, with random weights and KV:

python -m benchmarks.quantised_rounds --shape llama3-8b --context 4096 --draft-vocab 32768
python -m benchmarks.quantised_rounds --context 4096 32768 --draft-vocab 32768 --weights auto,fp8 \\
    --kv-dtype auto,fp8
python -m benchmarks.quantised_rounds --shape tiny --context 64 --device cpu --weights float32,int8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product

from benchmarks.latency import Latency, LatencySetting, measure_latency
from longspec.bench.environment import command_line, machine
from longspec.bench.report import table
from longspec.config import DraftConfig
from longspec.errors import UserError
from longspec.models.placement import gigabytes, pick_device, pick_dtype

HEADER = [
    "tokens", "weights", "KV", "step ms", "tokens/s", "against the first", "of the floor", "round ms",
    "round / step", "bytes of weights", "bytes of KV",
]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; a bad value is one line on standard error and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama3-8b", help="of the target (%(default)s)")
    parser.add_argument("--context", type=int, nargs="+", default=[4096], metavar="N", help="tokens (4096)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="rows (%(default)s)")
    parser.add_argument("--draft-vocab", type=int, default=0, metavar="N", help="0 is all (%(default)s)")
    parser.add_argument("--max-nodes", type=int, metavar="N", help="of the tree that are verified (all)")
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="timed at a time (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="turns each (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (%(default)s)")
    parser.add_argument("--exact", action="store_true", help="rounds as with longspec generate --exact")
    parser.add_argument(
        "--weights",
        metavar="TYPE,...",
        help="the types, each with its own target (bfloat16,int8,fp8 on a GPU, float32,int8 on a CPU)",
    )
    parser.add_argument(
        "--kv-dtype", default="auto", metavar="TYPE,...", help="of KV, each with all weights (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    try:
        print(_report(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _report(arguments: argparse.Namespace) -> str:
    device = pick_device(arguments.device)
    default = "bfloat16,int8,fp8" if device.type == "cuda" else "float32,int8"
    rows: list[list[str]] = []
    first: list[Latency] = []
    for weights, kv in product((arguments.weights or default).split(","), arguments.kv_dtype.split(",")):
        lines = _measure(arguments, weights, kv)
        first = first or lines
        rows += [_row(weights, kv, *pair) for pair in zip(lines, first, strict=True)]
        steps = ", ".join(f"{line.greedy.step.median:.3f}" for line in lines)
        print(f"weights {weights}, KV {kv}: step {steps} ms", file=sys.stderr)
    facts = machine(device, pick_dtype("auto", device)).items()
    told = ", ".join(f"{name} {value}" for name, value in facts if value is not None)
    shape = f"{arguments.shape}, batch {arguments.batch}, {first[0].nodes} nodes"
    rows.sort(key=lambda row: int(row[0].replace(",", "")))  # stable: the types stay in their order
    return "\n\n".join((f"`{command_line()}`", told, shape, table(HEADER, rows)))


def _measure(arguments: argparse.Namespace, weights: str, kv: str) -> list[Latency]:
    """A line for each context."""
    setting = LatencySetting(
        shape=arguments.shape,
        contexts=tuple(arguments.context),
        batches=(arguments.batch,),
        max_nodes=arguments.max_nodes,
        draft=DraftConfig(draft_vocab=arguments.draft_vocab),
        rounds=arguments.rounds,
        repeats=arguments.repeats,
        device=arguments.device,
        weights=weights,
        kv_dtype=kv,
        exact=arguments.exact,
    )
    found = measure_latency(setting)
    if found.missing:
        raise UserError(f"weights {weights!r}, {found.missing[0].context} tokens: {found.missing[0].why}")
    return found.lines


def _row(weights: str, kv: str, line: Latency, first: Latency) -> list[str]:
    mode = line.greedy
    return [
        f"{line.context:,}",
        weights,
        kv,
        f"{mode.step.median:.3f}",
        f"{1e3 * line.batch / mode.step.median:,.0f}",
        f"{first.greedy.step.median / mode.step.median:.2f}",
        f"{line.floor / mode.step.median:.2f}",
        f"{mode.round.median:.3f}",
        f"{mode.ratio.median:.2f}",
        gigabytes(line.weights_bytes),
        gigabytes(line.kv_bytes),
    ]


if __name__ == "__main__":
    sys.exit(main())
