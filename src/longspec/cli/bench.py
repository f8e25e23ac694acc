"""Measure this machine, side by side in one run.

longspec bench vanilla                              vanilla decoding against transformers' generate
longspec bench generate                             decoding methods against vanilla, on prompts of many kinds
longspec bench generate --workload questions.jsonl --methods auto,lookup:6 --baseline hf --output RUN
longspec bench context --methods auto               speed as the context grows
longspec bench longbench --model_name vicuna7b --method tree --task gov_report --data_path_prefix longbench/
longspec bench aime --model_name qwq --method tree --id_min 60 --id_max 89
longspec bench context --source meetings.jsonl --lengths 1024,4096 --methods tree:4x16x16 --limit 8
longspec bench load --rates 2,5,10 --requests 200   requests that arrive one by one, and how long each waits
longspec bench acceptance RUN --draft my-draft      what auto plans by, into the draft's folder
longspec bench report RUN                           one HTML page of a run, or of several
longspec bench latency --shape llama3-8b --context 4096 131072       cost of steps and rounds, random weights
longspec bench train --shape llama3-8b --seq-length 32768      training speed and memory, random weights
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from longspec.cli import bench_acceptance, bench_generate, bench_load, bench_random, bench_report
from longspec.cli.arguments import add_model_arguments, load

# Of each kind with a file of its own: its flags, what runs it, and what it is.
_KINDS = {
    "generate": (
        *(bench_generate.add_generate, bench_generate.run_generate),
        "decoding methods against vanilla and transformers, whole answers",
    ),
    "context": (
        *(bench_generate.add_context, bench_generate.run_context),
        "the same as the context grows to the model's limit",
    ),
    "longbench": (
        *(bench_generate.add_longbench, bench_generate.run_longbench),
        "the published experiment on LongBench, with its flags",
    ),
    "aime": (
        *(bench_generate.add_aime, bench_generate.run_aime),
        "the published experiment on AIME 2024, with its flags",
    ),
    "load": (
        *(bench_load.add_arguments, bench_load.run),
        "requests that arrive at given rates, and how long each waits",
    ),
    "latency": (
        *(bench_random.add_latency, bench_random.run_latency),
        "what a step and a round cost, by context and batch, random weights",
    ),
    "train": (
        *(bench_random.add_train, bench_random.run_train),
        "speed and memory of training a draft, random weights",
    ),
    "acceptance": (
        *(bench_acceptance.add_arguments, bench_acceptance.run),
        "put what runs measured of a draft into its folder: the table of auto, and the card",
    ),
    "report": (*(bench_report.add_arguments, bench_report.run), "one HTML page of a run, or of several"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec bench`."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    vanilla = kinds.add_parser("vanilla", help="vanilla decoding against transformers' generate")
    vanilla.add_argument("--context", type=int, default=512, metavar="N", help="prompt tokens (%(default)s)")
    vanilla.add_argument("--new-tokens", type=int, default=48, metavar="N", help="tokens made (%(default)s)")
    vanilla.add_argument("--repeats", type=int, default=5, metavar="N", help="timed runs each (%(default)s)")
    vanilla.set_defaults(draft="none", draft_dtype="auto")
    for name, (add, _, about) in _KINDS.items():
        add(kinds.add_parser(name, help=about))
    vanilla.add_argument("--json", action="store_true", help="print JSON")
    vanilla.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    add_model_arguments(vanilla)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.errors import UserError

    if arguments.kind in _KINDS:
        return _KINDS[arguments.kind][1](arguments)
    for name, minimum in {"context": 1, "repeats": 1, "new_tokens": 2}.items():
        value = getattr(arguments, name)
        if value < minimum:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least {minimum}")
    return _vanilla(arguments)


def _vanilla(arguments: argparse.Namespace) -> int:
    from longspec.bench.vanilla import Timing, compare
    from longspec.hub import resolve
    from longspec.progress import count_bar

    # The one that transformers is to load, fetched before anything is timed.
    folder = resolve(arguments.target, revision=arguments.revision, offline=arguments.offline).folder
    with count_bar("runs", arguments.repeats) as advance:
        result = compare(
            load(arguments, calibrate=False),
            folder,
            arguments.context,
            arguments.new_tokens,
            arguments.repeats,
            advance,
        )
    if arguments.json:
        ratios = {"decode_ratio": result.decode_ratio, "prefill_ratio": result.prefill_ratio}
        print(json.dumps(asdict(result) | ratios))
        return 0
    about = ", ".join(f"{name} {value}" for name, value in result.environment.items())
    print(f"{result.context} tokens of context, {result.new_tokens} new; {about}")

    def line(name: str, timing: Timing) -> str:
        spread = f"{timing.token_least * 1e3:.1f} to {timing.token_most * 1e3:.1f}"
        speed = f"{1 / timing.token:7.1f} tokens/s"
        return f"{name:13} {speed}   {timing.token * 1e3:6.1f} ms ({spread})   prefill {timing.prefill:.2f} s"

    print(line("longspec", result.ours))
    print(line("transformers", result.theirs))
    same = "the same tokens" if result.same_tokens else "DIFFERENT tokens"
    print(
        f"longspec decodes {result.decode_ratio:.2f} times as fast and prefills {result.prefill_ratio:.2f} "
        f"times as fast; both said {same}"
    )
    return 0
