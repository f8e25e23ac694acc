"""Make a draft for a target: plan, let the target write, train, measure, export.

longspec draft --target ./my-llama --output my-draft                 an hour of this machine
longspec draft --target ./my-llama --output my-draft --dry-run       only show the plan and its cost
longspec draft --target ./my-llama --output my-draft --budget 20m --prompts log.jsonl --documents docs.jsonl
longspec draft --target ./my-llama --output better --tokens 300M --draft my-draft

The target answers prompts of many kinds (instructions, conversations, mathematics, code, translation,
summaries, questions on passages and long documents, extraction, retrieval, JSON); a target without a chat
template continues texts. The draft learns from what it wrote, first at 1,024 tokens, then at the target's
whole context, as far as memory and budget allow.

After a stop, even by kill -9, run the same command again to continue. The output folder is a draft as soon as
it has a config.json; its folder `work` can be removed then.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, fields

from longspec.cli.arguments import add_device, add_json, add_options, given, given_path
from longspec.cli.command import Command
from longspec.cli.synthesize import amount
from longspec.cli.terminal import printable
from longspec.hub.registry import DEFAULT_TARGET
from longspec.pipeline.options import DraftOptions

_SECONDS = {"s": 1, "m": 60, "h": 3600}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", required=True, type=given_path, metavar="FOLDER", help="where the draft goes"
    )
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="MODEL",
        help="short name, hub id, Hugging Face folder or .gguf file (default: %(default)s)",
    )
    cost = parser.add_mutually_exclusive_group()
    cost.add_argument(
        "--budget",
        type=_time,
        dest="seconds",
        metavar="TIME",
        help="for all of it, such as 90s, 60m or 8h (default: 60m)",
    )
    cost.add_argument(
        "--tokens",
        type=amount,
        metavar="N",
        help="that the target writes, such as 300M, however long that takes",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the plan, and stop")
    add_json(parser)
    group = parser.add_argument_group("what it learns from")
    add_options(group, DraftOptions, "prompts", "documents", "licence", "draft", "seed")
    add_device(parser.add_argument_group("device"))


def _run(arguments: argparse.Namespace) -> int:
    from longspec.pipeline.card import plan_text, result_text
    from longspec.pipeline.run import make_draft, plan_draft

    options = DraftOptions(**given(arguments, (field.name for field in fields(DraftOptions))))
    plan = plan_draft(options)
    if arguments.dry_run:
        print(json.dumps(asdict(plan)) if arguments.json else printable(plan_text(plan)))
        return 0

    def tell(text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    tell(plan_text(plan) + "\n")
    figures = make_draft(options, plan, tell)
    if arguments.json:
        print(json.dumps({"draft": str(options.output), "figures": [asdict(one) for one in figures]}))
    else:
        print(printable(result_text(figures, options.target, options.output)))
    return 0


def _time(text: str) -> float:
    """A time such as 90s, 60m or 1.5h, for argparse."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text.strip().lower())
    if found is None or not 0 < float(found[1]) < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time like 90s, 60m or 8h")
    return float(found[1]) * _SECONDS[found[2]]


DRAFT = Command(__doc__, _add_arguments, _run)
