"""`longspec bench load`: requests that arrive one by one, and how long each waits."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from longspec.bench.settings import LoadSetting
from longspec.cli.arguments import add_json, add_model_arguments, add_options, given, given_path, load
from longspec.cli.command import Command
from longspec.cli.terminal import printable
from longspec.option import options_of

if TYPE_CHECKING:
    from longspec.bench.load import LoadRun, Percentiles


def _add_load(parser: argparse.ArgumentParser) -> None:
    add_options(parser.add_mutually_exclusive_group(), LoadSetting, "rates", "shares")
    parser.add_argument("--workload", default="builtin", metavar="NAME", help="as for bench generate")
    parser.add_argument("--data", type=given_path, metavar="FOLDER", help="as for bench generate")
    add_options(parser, LoadSetting, "requests", "max_new_tokens", "method", "temperature", "seed")
    parser.add_argument("--output", type=given_path, metavar="FILE", help="write the JSON to this file too")
    add_json(parser)
    add_model_arguments(parser)


def _load(arguments: argparse.Namespace) -> int:
    from longspec.atomic import check_file, write_whole
    from longspec.bench.catalogue import check_name, load_workload
    from longspec.bench.load import measure_load
    from longspec.bench.workloads import fitting

    check_name(arguments.workload)
    setting = LoadSetting(**given(arguments, options_of(LoadSetting)))
    if arguments.output:
        check_file(arguments.output)
    model = load(arguments, calibrate=setting.uses_auto)
    workload = load_workload(arguments.workload, model, arguments.data)
    workload = fitting(workload, model, setting.max_new_tokens)
    found = measure_load(model, workload, setting, progress=True)
    text = json.dumps(asdict(found))
    if arguments.json:
        print(text)
    else:
        _show_load(found)
    if arguments.output:  # after printing: if this fails, the figures are not lost
        write_whole(arguments.output, text.encode() + b"\n")
    return 0


def _show_load(run: LoadRun) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    facts = ", ".join(f"{name} {value}" for name, value in run.environment.items() if value is not None)
    console.print(printable(facts), markup=False, highlight=False)
    console.print(
        f"{run.setting.requests} requests at each rate, {run.num_prompts} different prompts of "
        f"{printable(run.workload)}, answers of at most {run.setting.max_new_tokens} tokens, method "
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


_ABOUT = """\
Send requests that arrive at given rates, and measure how long each waits.

longspec bench load --rates 2,5,10 --requests 200
longspec bench load --workload questions.jsonl --shares 0.5,0.8 --output load.json
"""
LOAD = Command(_ABOUT, _add_load, _load)
