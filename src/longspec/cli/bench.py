"""Measure this machine, side by side in one run.

longspec bench generate                             decoding methods against vanilla, on prompts of many kinds
longspec bench generate --methods vanilla --baseline hf   vanilla decoding against transformers' generate
longspec bench generate --workload questions.jsonl --methods auto,lookup:6 --output RUN
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

from longspec.cli import bench_acceptance, bench_generate, bench_load, bench_random, bench_report

# Of each kind: its flags, what runs it, and what it is.
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
    for name, (add, _, about) in _KINDS.items():
        add(kinds.add_parser(name, help=about))


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    return _KINDS[arguments.kind][1](arguments)
