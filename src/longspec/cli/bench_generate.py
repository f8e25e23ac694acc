"""`longspec bench generate`, `context`, `longbench` and `aime`: flags to one benchmark each."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from longspec.cli.arguments import add_model_arguments, load
from longspec.decoding.methods.registry import methods

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from longspec.api import LongSpec
    from longspec.bench.session import Settings
    from longspec.bench.workloads import Workload

    Workloads = Callable[[LongSpec], Sequence[Workload]]

Number = TypeVar("Number", int, float)
TREE_SHAPE = (4, 16, 16, 16, 16)


def add_generate(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec bench generate`."""
    parser.add_argument(
        "--workload",
        action="append",
        metavar="NAME",
        help="builtin, builtin:KIND, repo:N or text:N (a prompt of N tokens), longbench:TASK, aime, or a "
        "JSONL file with `prompt` or `turns`; repeatable (default: builtin)",
    )
    parser.add_argument("--data", metavar="FOLDER", help="has TASK.jsonl of LongBench and aime.jsonl")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of each kind")
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="answer N prompts of a kind at once (%(default)s)"
    )
    _add_methods(parser)
    _add_run(parser, max_new_tokens=64, repeats=3)


def add_context(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec bench context`."""
    parser.add_argument(
        "--lengths",
        metavar="N,N,...",
        help="prompt tokens (default: 1024, doubled up to what the model's limit leaves)",
    )
    parser.add_argument(
        "--source",
        default="repo",
        metavar="NAME",
        help="repo: Python's library to be continued; text: to be summarised; or a JSONL file with 'context' "
        "and 'input', or 'text'",
    )
    parser.add_argument(
        "--limit", type=int, default=1, metavar="N", help="prompts of each length, of a file (%(default)s)"
    )
    _add_methods(parser)
    _add_run(parser, max_new_tokens=64, repeats=3)


def add_longbench(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec bench longbench`: those of the published script, and ours."""
    parser.add_argument(
        "--task", default="lcc", help="gov_report, qmsum, multi_news, lcc or repobench-p (%(default)s)"
    )
    parser.add_argument(
        "--test_length", type=int, default=1, metavar="N", help="so many prompts; 0 is all (%(default)s)"
    )
    _add_published(parser, model="vicuna7b", max_gen_len=1024)


def add_aime(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec bench aime`: those of the published script, and ours."""
    parser.add_argument("--id_min", type=int, default=60, metavar="N", help="first problem (%(default)s)")
    parser.add_argument("--id_max", type=int, default=60, metavar="N", help="last problem (%(default)s)")
    _add_published(parser, model="qwq", max_gen_len=200)


def _add_published(parser: argparse.ArgumentParser, model: str, max_gen_len: int) -> None:
    parser.add_argument("--data_path_prefix", metavar="FOLDER", help="has the data (default: from the hub)")
    parser.add_argument("--method", default="tree", help="held against vanilla (%(default)s)")
    parser.add_argument("--gamma", type=int, default=4, metavar="N", help="chain length (%(default)s)")
    parser.add_argument(
        "--tree_shape",
        type=int,
        nargs="+",
        default=list(TREE_SHAPE),
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
        help=f"besides vanilla, of auto, {', '.join(methods())}; with a size (lookup:6, seq:4, tree:4x16x16, "
        "tree:8x32x32@64 for its best 64 nodes, +12 behind it to look up to 12 tokens up), and with options "
        "(magicdec:4:window=256) (default: %(default)s)",
    )


def _add_run(parser: argparse.ArgumentParser, max_new_tokens: int, repeats: int) -> None:
    """What every benchmark of whole answers takes."""
    parser.add_argument(
        "--max-new-tokens",
        "--max_gen_len",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help="longest answer (%(default)s)",
    )
    parser.add_argument("--temperature", default="0", metavar="T,T,...", help="one or more (%(default)s)")
    parser.add_argument("--repeats", type=int, default=repeats, metavar="N", help="timed (%(default)s)")
    parser.add_argument("--baseline", help="hf: transformers too, eager, compiled, and with its speculation")
    parser.add_argument("--assistant", metavar="MODEL", help="with --baseline hf: for its assisted decoding")
    parser.add_argument(
        "--output",
        metavar="RUN",
        help="the run's folder; one that was broken off goes on (default: a new one in outputs/)",
    )
    parser.add_argument("--draft", metavar="DRAFT", help="as for generate")
    parser.add_argument("--draft-dtype", default="auto", metavar="TYPE", help="as for generate")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    add_model_arguments(parser)


def run_generate(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.bench.catalogue import check_name, load_workload
    from longspec.errors import UserError

    names = list(dict.fromkeys(arguments.workload or ["builtin"]))
    data = Path(arguments.data) if arguments.data else None
    for name in names:
        check_name(name)
    settings = _settings(arguments, arguments.methods.split(","), arguments.limit, arguments.batch)
    if settings.batch > 1 and arguments.baseline:
        raise UserError(f"--baseline {arguments.baseline} answers one prompt at a time; leave out --batch")
    return _bench(arguments, settings, lambda model: [load_workload(name, model, data) for name in names])


def run_context(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.bench.catalogue import check_source, context_workload
    from longspec.errors import UserError

    check_source(arguments.source)
    if arguments.limit < 1:
        raise UserError(f"--limit is {arguments.limit}; it must be at least 1")
    settings = _settings(arguments, arguments.methods.split(","))
    lengths = numbers("--lengths", arguments.lengths, int) if arguments.lengths else None
    new = settings.max_new_tokens
    return _bench(
        arguments,
        settings,
        lambda model: [context_workload(model, arguments.source, lengths, new, arguments.limit)],
    )


def run_longbench(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.bench.catalogue import check_name, load_workload
    from longspec.errors import UserError

    name = f"longbench:{arguments.task}"
    check_name(name)
    if arguments.test_length < 0:
        raise UserError(f"--test_length is {arguments.test_length}; it must be 0 (all) or more")
    settings = _settings(arguments, [_published_label(arguments)], arguments.test_length or None)
    data = Path(arguments.data_path_prefix) if arguments.data_path_prefix else None
    return _bench(arguments, settings, lambda model: [load_workload(name, model, data)])


def run_aime(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.bench.published import aime

    settings = _settings(arguments, [_published_label(arguments)])
    data = Path(arguments.data_path_prefix) if arguments.data_path_prefix else None
    return _bench(arguments, settings, lambda model: [aime(data, arguments.id_min, arguments.id_max)])


def _published_label(arguments: argparse.Namespace) -> str:
    from longspec.decoding.methods.registry import choose_method, find

    sizes = {"gamma": arguments.gamma, "tree_shape": arguments.tree_shape}
    own = find(arguments.method).options()
    return choose_method(arguments.method, {name: sizes[name] for name in sizes if name in own}).label


def _settings(
    arguments: argparse.Namespace, methods: list[str], limit: int | None = None, batch: int = 1
) -> Settings:
    """Checked here, so that a bad value is told before a long load."""
    from longspec.bench.session import Settings
    from longspec.errors import UserError

    if arguments.baseline not in (None, "hf"):
        raise UserError(f"--baseline {arguments.baseline!r} is unknown; there is: hf")
    if arguments.assistant and not arguments.baseline:
        raise UserError("--assistant is for --baseline hf; give both")
    return Settings(
        methods=[name.strip() for name in methods if name.strip()],
        temperatures=numbers("--temperature", arguments.temperature, float),
        repeats=arguments.repeats,
        max_new_tokens=arguments.max_new_tokens,
        limit=limit,
        batch=batch,
    )


def numbers(flag: str, text: str, kind: type[Number]) -> list[Number]:
    """What a flag lists, each once."""
    from longspec.errors import UserError

    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise UserError(f"{flag} is {text!r}; numbers separated by commas are needed") from None


def _bench(arguments: argparse.Namespace, settings: Settings, workloads: Workloads) -> int:
    from longspec.bench.folder import read_run
    from longspec.bench.hf import Transformers, baselines
    from longspec.bench.markdown import report
    from longspec.bench.session import bench
    from longspec.bench.summary import to_json
    from longspec.hub import resolve
    from longspec.progress import count_bar

    name = f"bench-{arguments.kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    output = Path(arguments.output or Path("outputs") / name)
    model = load(arguments, "auto" in settings.methods, settings.batch)
    chosen = workloads(model)
    others: list[Transformers] = []
    missing: dict[str, str] = {}
    if arguments.baseline:
        folder = resolve(arguments.target, revision=arguments.revision, offline=arguments.offline).folder
        assistant = resolve(arguments.assistant).folder if arguments.assistant else None
        others, missing = baselines(model, folder, assistant)
    figures = bench(
        *(model, chosen, settings, output, others, missing),
        bar=lambda total: count_bar("answers", total),
    )
    if arguments.json:
        print(json.dumps({"run": str(output), "figures": to_json(figures)}))
    else:
        print(report(figures, read_run(output)[0]))
        print(f"Rows and plots are in {output}; for a page of it: longspec bench report {output}")
    return 0
