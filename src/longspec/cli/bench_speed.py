"""`longspec bench load`, `latency` and `train`: waiting under load, and speed with random weights."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from longspec.cli.arguments import (
    add_device,
    add_model_arguments,
    add_tree_shape,
    load,
    number,
    numbers,
    positive_number,
    whole_number,
    whole_numbers,
)
from longspec.cli.command import Command
from longspec.config import DEFAULT_TREE

if TYPE_CHECKING:
    from longspec.bench.latency import Latencies, LatencySetting
    from longspec.bench.load import LoadRun, Percentiles
    from longspec.config import DraftConfig


def _add_load(parser: argparse.ArgumentParser) -> None:
    rates = parser.add_mutually_exclusive_group()
    rates.add_argument(
        "--rates", type=numbers, metavar="R,R,...", help="requests per second, one after the other"
    )
    rates.add_argument(
        "--shares",
        type=numbers,
        metavar="S,S,...",
        help="the same, as shares of what is answered when all are submitted at once, which is measured "
        "first (default: 0.3,0.6,0.9)",
    )
    parser.add_argument("--workload", default="builtin", metavar="NAME", help="as for bench generate")
    parser.add_argument("--data", metavar="FOLDER", help="as for bench generate")
    parser.add_argument(
        "--requests",
        type=whole_number,
        default=64,
        metavar="N",
        help="at each rate; prompts are repeated as often as it takes (%(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens", type=whole_number, default=64, metavar="N", help="longest answer (%(default)s)"
    )
    parser.add_argument("--method", default="auto", help="as one of bench generate's --methods (%(default)s)")
    parser.add_argument("--temperature", type=number, default=0.0, metavar="T", help="(%(default)s)")
    parser.add_argument("--seed", type=whole_number, default=0, help="of arrivals and answers (%(default)s)")
    parser.add_argument("--output", metavar="FILE", help="write the JSON to this file too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_model_arguments(parser)


def _load(arguments: argparse.Namespace) -> int:
    from longspec.bench.catalogue import check_name, load_workload
    from longspec.bench.load import LoadSetting, measure_load, to_json
    from longspec.bench.workloads import fitting
    from longspec.models.files import write_whole
    from longspec.progress import count_bar

    check_name(arguments.workload)
    shares = () if arguments.rates else arguments.shares or (0.3, 0.6, 0.9)
    setting = LoadSetting(
        requests=arguments.requests,
        rates=tuple(dict.fromkeys(arguments.rates or ())),
        shares=tuple(dict.fromkeys(shares)),
        max_new_tokens=arguments.max_new_tokens,
        method=arguments.method,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    model = load(arguments, calibrate=arguments.method == "auto")
    data = Path(arguments.data) if arguments.data else None
    workload = fitting(load_workload(arguments.workload, model, data), model, setting.max_new_tokens)
    found = measure_load(model, workload, setting, count_bar)
    text = json.dumps(to_json(found))
    if arguments.output:
        write_whole(Path(arguments.output), text.encode() + b"\n")
    if arguments.json:
        print(text)
    else:
        _show_load(found)
    return 0


def _show_load(run: LoadRun) -> None:
    """The run for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    facts = ", ".join(f"{name} {value}" for name, value in run.environment.items() if value is not None)
    console.print(facts, markup=False, highlight=False)
    console.print(
        f"{run.setting.requests} requests at each rate, {run.num_prompts} different prompts of "
        f"{run.workload}, answers of at most {run.setting.max_new_tokens} tokens, method "
        f"{run.setting.method}; times in milliseconds at p50 / p90 / p99",
        markup=False,
        highlight=False,
    )
    table = Table()
    for name in ("requests/s", "requests", "tokens/s", "first token", "between tokens", "whole answer"):
        table.add_column(name, justify="right")
    table.add_column("longest wait", justify="right")
    for line in run.lines:
        rate = "all at once" if line.rate is None else f"{line.rate:.3g}"
        table.add_row(
            rate if line.share is None else f"{rate} ({line.share:.0%})",
            str(line.requests),
            f"{line.tokens_per_second:,.1f}",
            *(_milliseconds(one) for one in (line.first_token, line.between_tokens, line.whole)),
            f"{1e3 * line.longest_wait:,.0f}",
        )
    console.print(table)
    starved = sum(line.starved for line in run.lines)
    print(f"{starved} requests starved: they never finished" if starved else "No request starved")


def _milliseconds(found: Percentiles | None) -> str:
    if found is None:
        return "-"
    return " / ".join(f"{1e3 * one:,.{0 if one >= 0.1 else 1}f}" for one in (found.p50, found.p90, found.p99))


def _add_latency(parser: argparse.ArgumentParser) -> None:
    _add_shape(parser)
    for flag, default, what in (("--context", 1024, "tokens"), ("--batch", 1, "rows")):
        parser.add_argument(
            flag,
            type=whole_number,
            nargs="+",
            default=[default],
            metavar="N",
            help=f"{what}; one or more ({default})",
        )
    add_tree_shape(parser, DEFAULT_TREE)
    parser.add_argument(
        "--max-nodes",
        default="64",
        metavar="N",
        help="nodes that are verified, the root among them; auto: the tree that --method auto would take for "
        "the context and batch, no deeper than --tree-shape (%(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=number,
        default=0.7,
        metavar="T",
        help="of the sampled rounds, measured beside greedy ones; 0 leaves them out (%(default)s)",
    )
    parser.add_argument("--top-p", type=number, default=0.9, metavar="P", help="of the same (%(default)s)")
    parser.add_argument(
        "--rounds", type=whole_number, default=40, metavar="N", help="timed at a time (%(default)s)"
    )
    parser.add_argument(
        "--repeats", type=whole_number, default=5, metavar="N", help="turns each (%(default)s)"
    )
    parser.add_argument("--tau", type=number, metavar="T", help="show the tree's tokens/s at this tau too")
    parser.add_argument("--attention", default="auto", help="auto (triton on a GPU), torch or triton")
    add_device(parser)
    parser.add_argument(
        "--output", metavar="FOLDER", help="write latency.json, latency.md and latency.png there"
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_shape(parser)
    parser.add_argument("--seq-length", type=positive_number, default=1024, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--micro-batch", type=positive_number, default=1, metavar="N", help="sequences (%(default)s)"
    )
    parser.add_argument("--soft", type=number, default=0.0, metavar="S", help="share of KL in the loss")
    parser.add_argument("--compile", action="store_true", help="let torch.compile fuse the layers")
    parser.add_argument("--steps", type=positive_number, default=10, metavar="N", help="timed (%(default)s)")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    """The random target and its draft."""
    parser.add_argument("--shape", default="smollm2-135m", metavar="NAME", help="of the target (%(default)s)")
    parser.add_argument(
        "--cross-layers",
        type=whole_numbers,
        default=(-1,),
        metavar="L,L,...",
        help="that the draft reads, such as 9,19,-1 (default: -1)",
    )
    parser.add_argument("--feature", action="store_true", help="give the draft the target's hidden state")
    parser.add_argument(
        "--draft-vocab", type=whole_number, default=0, metavar="N", help="0 is all (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _draft(arguments: argparse.Namespace, depth: int | None = None) -> DraftConfig:
    from longspec.config import DraftConfig

    return DraftConfig(
        max_lag=depth or DraftConfig.max_lag,
        cross_layers=arguments.cross_layers,
        use_feature=arguments.feature,
        draft_vocab=arguments.draft_vocab,
        qkv_bias=not arguments.feature,
        final_norm=arguments.feature,
    )


def _latency(arguments: argparse.Namespace) -> int:
    from longspec.bench.latency import measure_latency, to_json, write_report
    from longspec.bench.plots import can_draw
    from longspec.bench.report import latency_markdown
    from longspec.errors import UserError
    from longspec.progress import count_bar

    if arguments.tau is not None and arguments.tau < 1:
        raise UserError(f"--tau is {arguments.tau:g}; a round emits at least 1 token")
    setting = _setting(arguments)
    folder = Path(arguments.output) if arguments.output else None
    with count_bar("lines", len(setting.contexts) * len(setting.batches)) as advance:

        def on_line(found: Latencies) -> None:
            if folder is not None:
                write_report(found, folder, arguments.tau)
            advance(1)

        found = measure_latency(setting, on_line)
    if arguments.json:
        print(json.dumps(to_json(found, arguments.tau)))
        return 0
    print(latency_markdown(found, arguments.tau))
    if folder is not None:
        print(f"The same as Markdown and JSON{' and a plot' if can_draw() else ''} is in {folder}")
    return 0


def _setting(arguments: argparse.Namespace) -> LatencySetting:
    from longspec.bench.latency import LatencySetting
    from longspec.decoding.sampling import Sampling
    from longspec.errors import UserError

    auto = arguments.max_nodes == "auto"
    try:
        max_nodes = None if auto else int(arguments.max_nodes)
    except ValueError:
        raise UserError(f"--max-nodes is {arguments.max_nodes!r}; give a number, or auto") from None
    sampling = Sampling(arguments.temperature, top_p=arguments.top_p)
    return LatencySetting(
        shape=arguments.shape,
        contexts=tuple(dict.fromkeys(arguments.context)),
        batches=tuple(dict.fromkeys(arguments.batch)),
        tree_shape=arguments.tree_shape,
        max_nodes=max_nodes,
        auto=auto,
        draft=_draft(arguments, len(arguments.tree_shape)),
        sampling=None if sampling.greedy else sampling,
        rounds=arguments.rounds,
        repeats=arguments.repeats,
        device=arguments.device,
        dtype=arguments.dtype,
        attention=arguments.attention,
    )


def _train(arguments: argparse.Namespace) -> int:
    from longspec.bench.training import measure_training, report

    found = measure_training(
        arguments.shape,
        arguments.seq_length,
        arguments.micro_batch,
        _draft(arguments),
        arguments.soft,
        arguments.compile,
        arguments.steps,
    )
    print(json.dumps(asdict(found)) if arguments.json else report(found))
    return 0


LOAD = Command("Send requests that arrive at given rates, and measure how long each waits.", _add_load, _load)
LATENCY = Command(
    "Measure what a step and a round cost, by context and batch, with random weights.", _add_latency, _latency
)
TRAIN = Command("Measure speed and memory of training a draft, with random weights.", _add_train, _train)
