"""Time and memory by shape alone, with random weights, so that nothing is downloaded.

python -m benchmarks.random_weights latency --shape llama3-8b --context 4096 131072   cost of steps and rounds
python -m benchmarks.random_weights train --shape llama3-8b --seq-length 32768   training speed, memory
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.latency import Latencies, LatencySetting, measure_latency
from benchmarks.latency_report import latency_markdown, to_json, write_report
from benchmarks.training import measure_training, report
from longspec.bench.plots import can_draw
from longspec.cli.arguments import (
    add_device,
    add_kv_dtype,
    add_option,
    add_options,
    add_weights,
)
from longspec.cli.command import Command, Parser, add_commands
from longspec.config import DraftConfig
from longspec.decoding.methods import Tree
from longspec.decoding.sampling import Sampling
from longspec.errors import UserError
from longspec.option import Option
from longspec.progress import count_bar


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; a bad value is one line on standard error and exit code 2."""
    parser = Parser(prog="python -m benchmarks.random_weights", description=__doc__)
    add_commands(parser, _COMMANDS, "kind")
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.handler(arguments)
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_latency(parser: argparse.ArgumentParser) -> None:
    _add_shape(parser)
    for flag, default, what in (("--context", 1024, "tokens"), ("--batch", 1, "rows")):
        parser.add_argument(
            flag,
            type=int,
            nargs="+",
            default=[default],
            metavar="N",
            help=f"{what}; one or more ({default})",
        )
    add_options(parser, Tree, "tree_shape")
    parser.add_argument(
        "--max-nodes",
        default="64",
        metavar="N",
        help="nodes that are verified, the root among them; auto: the tree that --method auto would take for "
        "the context and batch, no deeper than --tree-shape (%(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="T",
        help="of the sampled rounds, measured beside greedy ones; 0 leaves them out (%(default)s)",
    )
    parser.add_argument("--top-p", type=float, default=0.9, metavar="P", help="of the same (%(default)s)")
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="timed at a time (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="turns each (%(default)s)")
    parser.add_argument("--tau", type=float, metavar="T", help="show the tree's tokens/s at this tau too")
    parser.add_argument("--attention", default="auto", help="auto (triton on a GPU), torch or triton")
    parser.add_argument("--exact", action="store_true", help="rounds as with longspec generate --exact")
    add_device(parser)
    add_weights(parser)
    add_kv_dtype(parser)
    parser.add_argument(
        "--output", metavar="FOLDER", help="write latency.json, latency.md and latency.png there"
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_shape(parser)
    parser.add_argument("--seq-length", type=int, default=1024, metavar="N", help="(%(default)s)")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="N", help="sequences (%(default)s)")
    parser.add_argument("--soft", type=float, default=0.0, metavar="S", help="share of KL in the loss")
    parser.add_argument(
        "--prompt-share", type=float, default=0.0, metavar="S", help="of a sequence; it is not learnt"
    )
    parser.add_argument("--compile", action="store_true", help="let torch.compile fuse the layers")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed (%(default)s)")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    """The random target and its draft."""
    parser.add_argument("--shape", default="smollm2-135m", metavar="NAME", help="of the target (%(default)s)")
    layers = Option("cross_layers", tuple[int, ...], (-1,), "that the draft reads, such as 9,19,-1")
    add_option(parser, layers)
    parser.add_argument("--feature", action="store_true", help="give the draft the target's hidden state")
    parser.add_argument("--draft-vocab", type=int, default=0, metavar="N", help="0 is all (%(default)s)")
    parser.add_argument("--parents", action="store_true", help="the draft reads its parents, and has gates")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _draft(arguments: argparse.Namespace, depth: int | None = None) -> DraftConfig:
    return DraftConfig(
        max_lag=depth or DraftConfig.max_lag,
        cross_layers=arguments.cross_layers,
        use_feature=arguments.feature,
        draft_vocab=arguments.draft_vocab,
        qkv_bias=not arguments.feature,
        final_norm=arguments.feature,
        use_parent=arguments.parents,
        lag_gate=arguments.parents,
    )


def _latency(arguments: argparse.Namespace) -> int:
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
        weights=arguments.weights,
        kv_dtype=arguments.kv_dtype,
        exact=arguments.exact,
        attention=arguments.attention,
    )


def _train(arguments: argparse.Namespace) -> int:
    found = measure_training(
        arguments.shape,
        arguments.seq_length,
        arguments.micro_batch,
        _draft(arguments, 6 if arguments.parents else None),
        arguments.soft,
        arguments.compile,
        arguments.prompt_share,
        arguments.steps,
    )
    print(json.dumps(asdict(found)) if arguments.json else report(found))
    return 0


_COMMANDS = {
    "latency": Command("Measure what a step and a round cost, by context and batch.", _add_latency, _latency),
    "train": Command("Measure speed and memory of training a draft.", _add_train, _train),
}

if __name__ == "__main__":
    sys.exit(main())
