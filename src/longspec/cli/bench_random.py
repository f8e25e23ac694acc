"""`longspec bench latency` and `train`: what is measured of a shape alone, with random weights."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from longspec.cli.arguments import add_tree_shape
from longspec.config import DEFAULT_TREE

if TYPE_CHECKING:
    from longspec.bench.latency import Latencies, LatencySetting
    from longspec.config import DraftConfig


def add_latency(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec bench latency`."""
    _add_shape(parser)
    for flag, default, what in (("--context", 1024, "tokens"), ("--batch", 1, "rows")):
        parser.add_argument(
            flag, type=int, nargs="+", default=[default], metavar="N", help=f"{what}; one or more ({default})"
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
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (%(default)s)")
    parser.add_argument(
        "--output", metavar="FOLDER", help="write latency.json, latency.md and latency.png there"
    )


def add_train(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec bench train`."""
    _add_shape(parser)
    parser.add_argument("--seq-length", type=int, default=1024, metavar="N", help="(%(default)s)")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="N", help="sequences (%(default)s)")
    parser.add_argument("--soft", type=float, default=0.0, metavar="S", help="share of KL in the loss")
    parser.add_argument("--compile", action="store_true", help="let torch.compile fuse the layers")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed (%(default)s)")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    """The random target and its draft."""
    parser.add_argument("--shape", default="smollm2-135m", metavar="NAME", help="of the target (%(default)s)")
    parser.add_argument(
        "--cross-layers", default="-1", metavar="L,L,...", help="that the draft reads (%(default)s)"
    )
    parser.add_argument("--feature", action="store_true", help="give the draft the target's hidden state")
    parser.add_argument("--draft-vocab", type=int, default=0, metavar="N", help="0 is all (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def _draft(arguments: argparse.Namespace, depth: int | None = None) -> DraftConfig:
    from longspec.config import DraftConfig
    from longspec.errors import UserError

    try:
        layers = tuple(int(layer) for layer in arguments.cross_layers.split(","))
    except ValueError:
        raise UserError(
            f"--cross-layers is {arguments.cross_layers!r}; give numbers such as 9,19,-1"
        ) from None
    return DraftConfig(
        max_lag=depth or DraftConfig.max_lag,
        cross_layers=layers,
        use_feature=arguments.feature,
        draft_vocab=arguments.draft_vocab,
        qkv_bias=not arguments.feature,
        final_norm=arguments.feature,
    )


def run_latency(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
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
    from longspec.decoding.choose import Sampling
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


def run_train(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.bench.training import measure_training, report
    from longspec.errors import UserError

    for name in ("seq_length", "micro_batch", "steps"):
        if getattr(arguments, name) < 1:
            raise UserError(
                f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be at least 1"
            )
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
