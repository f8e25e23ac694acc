"""`longspec bench`: measure whole answers in one run, and report such runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspec.bench.settings import RunSetting
from longspec.cli.arguments import (
    add_json,
    add_model_arguments,
    add_number,
    add_option,
    add_options,
    given_path,
    load,
)
from longspec.cli.bench_load import LOAD
from longspec.cli.command import Command, add_commands
from longspec.cli.terminal import printable
from longspec.decoding.methods import Seq
from longspec.decoding.methods.registry import choices, choose_method, find
from longspec.option import Option, options_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from longspec.api import LongSpec
    from longspec.bench.summary import Figures
    from longspec.bench.workloads import Workload

    Workloads = Callable[[LongSpec], Sequence[Workload]]

_ABOUT = """\
Measure decoding methods on this machine, all in one run.

longspec bench generate                             decoding methods against vanilla, on prompts of many kinds
longspec bench generate --methods vanilla --baseline hf  vanilla decoding against transformers' generate
longspec bench generate --workload questions.jsonl --methods auto,lookup:6 --output RUN
longspec bench context --methods auto               speed as the context grows
longspec bench longbench --model_name vicuna7b --method tree --task gov_report --data_path_prefix longbench/
longspec bench aime --model_name qwq --method tree --id_min 60 --id_max 89
longspec bench context --source meetings.jsonl --lengths 1024,4096 --methods tree:4x16x16 --limit 8
longspec bench load --rates 2,5,10 --requests 200   requests that arrive one by one, and how long each waits
longspec bench acceptance RUN --draft my-draft      note the acceptance, for auto, in the draft's folder
longspec bench report RUN                           one HTML page of one or more runs
"""
_PUBLISHED_TREE = (4, 16, 16, 16, 16)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        action="append",
        metavar="NAME",
        help="builtin, builtin:KIND, repo:N or text:N (a prompt of N tokens), longbench:TASK, aime, or a "
        "JSONL file with `prompt` or `turns`; repeatable (default: builtin)",
    )
    parser.add_argument(
        "--data", type=given_path, metavar="FOLDER", help="has TASK.jsonl of LongBench and aime.jsonl"
    )
    add_options(parser, RunSetting, "limit", "batch")
    _add_methods(parser)
    _add_run(parser, max_new_tokens=64, repeats=3, rows="as --batch")


def _add_context(parser: argparse.ArgumentParser) -> None:
    about = "prompt tokens (default: 1024, doubled up to what the model's limit leaves, or the file's texts)"
    add_option(parser, Option("lengths", tuple[int, ...], None, about))
    parser.add_argument(
        "--source",
        default="repo",
        metavar="NAME",
        help="repo: continue Python's library; text: summarise its manual; or a JSONL file with 'context' "
        "and 'input', or 'text'",
    )
    add_number(parser, "--limit", 1, "with a file: prompts of each length", least=1)
    _add_methods(parser)
    _add_run(parser, max_new_tokens=64, repeats=3)


def _add_longbench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--task", default="lcc", help="gov_report, qmsum, multi_news, lcc or repobench-p (%(default)s)"
    )
    add_number(parser, "--test_length", 1, "number of prompts; 0 is all", least=0)
    _add_published(parser, model="vicuna7b", max_gen_len=1024)


def _add_aime(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--id_min", 60, "first problem")
    add_number(parser, "--id_max", 60, "last problem")
    _add_published(parser, model="qwq", max_gen_len=200)


def _add_published(parser: argparse.ArgumentParser, model: str, max_gen_len: int) -> None:
    parser.add_argument(
        "--data_path_prefix",
        dest="data",
        type=given_path,
        metavar="FOLDER",
        help="has the data (default: from the hub)",
    )
    parser.add_argument("--method", default="tree", help="compared with vanilla (%(default)s)")
    add_options(parser, Seq, "gamma")
    parser.add_argument(
        "--tree_shape",
        type=int,
        nargs="+",
        default=list(_PUBLISHED_TREE),
        metavar="N",
        help="nodes per depth, as in 4 16 16 16 16",
    )
    _add_run(parser, max_new_tokens=max_gen_len, repeats=1)
    parser.add_argument("--model_name", dest="target", default=argparse.SUPPRESS, help="the same as --target")
    parser.set_defaults(target=model)


def _add_methods(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--methods",
        default="auto,lookup",
        metavar="M,M,...",
        help=f"besides vanilla, from {', '.join(choices())}; with a size (lookup:6, seq:4, tree:4x16x16, "
        "tree:8x32x32@64 for its best 64 nodes, +12 after it for up to 12 tokens from lookup) and with "
        "options of generate (magicdec:4:window=256, tree:acceptance=rejection) (default: %(default)s)",
    )


def _add_run(parser: argparse.ArgumentParser, max_new_tokens: int, repeats: int, rows: str = "1") -> None:
    own = options_of(RunSetting)
    add_option(parser, own["max_new_tokens"], "--max-new-tokens", "--max_gen_len", default=max_new_tokens)
    add_option(parser, own["temperatures"], "--temperature")
    add_option(parser, own["repeats"], default=repeats)
    parser.add_argument(
        "--baseline", choices=["hf"], help="transformers too, eager, compiled, and with its speculation"
    )
    parser.add_argument("--assistant", metavar="MODEL", help="with --baseline hf: for its assisted decoding")
    parser.add_argument(
        "--output",
        type=given_path,
        metavar="RUN",
        help="the run's folder; an unfinished run continues (default: a new one in outputs/)",
    )
    add_json(parser)
    add_model_arguments(parser, rows)


def _generate(arguments: argparse.Namespace) -> int:
    from longspec.bench.catalogue import check_name, load_workload
    from longspec.errors import UserError

    names = list(dict.fromkeys(arguments.workload or ["builtin"]))
    for name in names:
        check_name(name)
    settings = _settings(arguments, arguments.methods.split(","), arguments.limit, arguments.batch)
    if settings.batch > 1 and arguments.baseline:
        raise UserError(f"--baseline {arguments.baseline} answers one prompt at a time; leave out --batch")
    return _bench(
        arguments, settings, lambda model: [load_workload(name, model, arguments.data) for name in names]
    )


def _context(arguments: argparse.Namespace) -> int:
    from longspec.bench.catalogue import check_source, context_workload

    check_source(arguments.source)
    settings = _settings(arguments, arguments.methods.split(","))
    lengths = list(dict.fromkeys(arguments.lengths)) if arguments.lengths else None
    new = settings.max_new_tokens
    return _bench(
        arguments,
        settings,
        lambda model: [context_workload(model, arguments.source, lengths, new, arguments.limit)],
    )


def _longbench(arguments: argparse.Namespace) -> int:
    from longspec.bench.catalogue import check_name, load_workload

    name = f"longbench:{arguments.task}"
    check_name(name)
    settings = _settings(arguments, [_published_label(arguments)], arguments.test_length or None)
    return _bench(arguments, settings, lambda model: [load_workload(name, model, arguments.data)])


def _aime(arguments: argparse.Namespace) -> int:
    from longspec.bench.catalogue import aime

    settings = _settings(arguments, [_published_label(arguments)])
    return _bench(
        arguments, settings, lambda model: [aime(arguments.data, arguments.id_min, arguments.id_max)]
    )


def _published_label(arguments: argparse.Namespace) -> str:
    sizes = {"gamma": arguments.gamma, "tree_shape": arguments.tree_shape}
    own = find(arguments.method).options()
    return choose_method(arguments.method, {name: sizes[name] for name in sizes if name in own}).label


def _settings(
    arguments: argparse.Namespace, methods: list[str], limit: int | None = None, batch: int = 1
) -> RunSetting:
    """Checked here, so that a bad value is refused before a long load."""
    from longspec.errors import UserError

    if arguments.assistant and not arguments.baseline:
        raise UserError("--assistant is for --baseline hf; give both")
    return RunSetting(
        [name.strip() for name in methods if name.strip()],
        tuple(dict.fromkeys(arguments.temperatures)),
        arguments.repeats,
        arguments.max_new_tokens,
        limit,
        batch,
    )


def _bench(arguments: argparse.Namespace, settings: RunSetting, workloads: Workloads) -> int:
    from longspec.bench.folder import check_place, read_run
    from longspec.bench.hf import Transformers, baselines
    from longspec.bench.plots import can_draw
    from longspec.bench.report import markdown
    from longspec.bench.run import bench
    from longspec.hub import resolve

    name = f"bench-{arguments.kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    output = arguments.output or Path("outputs") / name
    check_place(output)
    model = load(arguments, settings.uses_auto, settings.batch)
    chosen = workloads(model)
    others: list[Transformers] = []
    missing: dict[str, str] = {}
    if arguments.baseline:
        folder = resolve(arguments.target, revision=arguments.revision, offline=arguments.offline).folder
        assistant = resolve(arguments.assistant).folder if arguments.assistant else None
        others, missing = baselines(model, folder, assistant)
    figures = bench(model, chosen, settings, output, others, missing, progress=True)
    if arguments.json:
        print(json.dumps({"run": str(output), "figures": [asdict(one) for one in figures]}))
    else:
        run = read_run(output)[0]
        if sys.stdout.isatty():
            _show(figures, run)
        else:
            print(printable(markdown(figures, run)))
        what = "Rows and plots" if can_draw() else "Rows"
        shown = printable(str(output))
        print(f"{what} are in {shown}; to make a page: longspec bench report {shown}")
    return 0


def _show(figures: Sequence[Figures], run: dict[str, Any]) -> None:
    """The medians as a table for a terminal; report.md has the rest."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from longspec.bench.report import about, fastest_peer

    console, table = Console(), Table()
    peers = any(fastest_peer(one) for one in figures)
    for name in ("prompts", "T", "method"):
        table.add_column(name, overflow="fold")
    for name in ("tokens/s", "speedup", *(["vs hf"] if peers else []), "tau"):
        table.add_column(name, justify="right")
    table.add_column("same words")
    for place, one in enumerate(figures):
        peer = fastest_peer(one)
        ratios = [one.speedup.get("vanilla"), *([one.speedup[peer] if peer else None] if peers else [])]
        same = f"{one.compared - one.different} of {one.compared}" if one.compared else "-"
        first = place == 0 or figures[place - 1].name != one.name
        cells = [
            one.name if first else "",
            f"{one.temperature:g}",
            one.method,
            f"{one.tokens_per_second.median:,.1f}",
        ]
        cells += ["-" if ratio is None else f"{ratio.median:.2f}" for ratio in ratios]
        cells += ["-" if one.tau is None else f"{one.tau:.2f}", same]
        last = place + 1 == len(figures) or figures[place + 1].name != one.name
        table.add_row(*(Text(printable(cell)) for cell in cells), end_section=last)
    console.print(printable(about(run, shows_range=False)), markup=False, highlight=False)
    console.print(table)
    for name, why in run.get("left_out", {}).items():
        console.print(printable(f"Left out: {name}: {why}."), markup=False, highlight=False)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=given_path, metavar="RUN", help="folders of `longspec bench`")
    parser.add_argument(
        "--output",
        type=given_path,
        metavar="FILE",
        help="the page to write (default: report.html in the first run)",
    )
    add_number(parser, "--answers", 4, "shown in colour", least=0)


def _report(arguments: argparse.Namespace) -> int:
    from longspec.bench.report import write_page

    output = arguments.output or arguments.runs[0] / "report.html"
    write_page(arguments.runs, output, arguments.answers)
    print(printable(str(output)))
    return 0


def _add_acceptance(parser: argparse.ArgumentParser) -> None:
    about = "folders of `longspec bench`, with this draft"
    parser.add_argument("runs", nargs="+", type=given_path, metavar="RUN", help=about)
    about = "whose config and card are updated"
    parser.add_argument("--draft", required=True, type=given_path, metavar="FOLDER", help=about)


def _acceptance(arguments: argparse.Namespace) -> int:
    from longspec.bench.acceptance import note_acceptance

    print(json.dumps(note_acceptance(arguments.runs, arguments.draft)))
    return 0


_COMMANDS = {
    "generate": Command(
        """\
Measure decoding methods against vanilla and transformers, whole answers.

longspec bench generate --methods auto,lookup:6 --limit 4
longspec bench generate --workload questions.jsonl --methods tree:4x16x16 --output outputs/mine
""",
        _add_generate,
        _generate,
    ),
    "context": Command(
        """\
Measure the same with longer and longer prompts.

longspec bench context --lengths 1024,4096 --methods auto
""",
        _add_context,
        _context,
    ),
    "longbench": Command(
        "Run the published experiment on LongBench, with its flags.", _add_longbench, _longbench
    ),
    "aime": Command("Run the published experiment on AIME 2024, with its flags.", _add_aime, _aime),
    "load": LOAD,
    "acceptance": Command(
        """\
Write the measured acceptance of a draft into its folder: the table for auto, and the card.

longspec bench acceptance outputs/mine --draft my-draft
""",
        _add_acceptance,
        _acceptance,
    ),
    "report": Command(
        """\
Make one HTML page of one or more runs.

longspec bench report outputs/mine outputs/other --output page.html
""",
        _add_report,
        _report,
    ),
}
BENCH = Command(_ABOUT, lambda parser: add_commands(parser, _COMMANDS, "kind"))
