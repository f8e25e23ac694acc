"""Let the target write training data for its draft, without a dataset.

The target continues the chat template's user prefix to a question, then answers it. It can also answer your
prompts, continue documents, or do all of these by shares. Loops and near-duplicates are dropped.

longspec data synthesize --output data/own --tokens 10M
longspec data synthesize --output data/own --tokens 2M --prefixes topics.txt --temperatures 0,0.7
longspec data synthesize --output data/mix --tokens 10M --mode questions:0.6,prompts:0.2,documents:0.2 \\
    --prompts prompts.jsonl --documents books.jsonl

After a stop, even by kill -9, run the same command again to continue. The result has the same bytes, because
the seed and the number of a sample decide it, on the same kind of device with the same batch.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, fields

from longspec.cli.arguments import add_device, add_json, add_options, add_target, given, given_path
from longspec.cli.command import Command
from longspec.cli.terminal import printable
from longspec.data.options import SynthesisOptions

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", required=True, type=given_path, metavar="FOLDER", help="where the dataset goes"
    )
    parser.add_argument(
        "--tokens",
        required=True,
        type=amount,
        metavar="N",
        help="how many at least, with prompts, such as 500k or 10M",
    )
    add_json(parser)
    group = parser.add_argument_group("what is written")
    group.add_argument(
        "--mode",
        type=_shares,
        dest="modes",
        metavar="MODE[:SHARE],...",
        help="questions: the target asks itself and answers (default); prompts: it answers --prompts; "
        "documents: it continues --documents; shares count samples",
    )
    add_options(group, SynthesisOptions, "prompts", "documents", "prefixes", "given_tokens", "licence")
    group = parser.add_argument_group("sampling")
    add_options(group, SynthesisOptions, "temperatures", "question_temperature", "max_new_tokens")
    add_options(group, SynthesisOptions, "max_question_tokens", "seed")
    group = parser.add_argument_group("target and shards")
    add_target(group)
    add_device(group)
    add_options(group, SynthesisOptions, "seq_length", "batch", "shard_samples", "seconds")


def _run(arguments: argparse.Namespace) -> int:
    from longspec.data.synthesize import synthesize

    request = SynthesisOptions(**given(arguments, (field.name for field in fields(SynthesisOptions))))
    made = synthesize(request, progress=True)
    if arguments.json:
        print(json.dumps(asdict(made)))
        return 0
    dropped = ", ".join(f"{number} {reason}" for reason, number in sorted(made.dropped.items())) or "none"
    speed = f" at {made.tokens_per_second:,.0f} tokens/s" if made.tokens_written else ", made before"
    print(
        f"{printable(made.folder)}: {made.num_tokens:,} tokens in {made.num_sequences:,} sequences{speed}; "
        f"{made.kept:,} of {made.num_samples:,} samples kept, {made.loops_cut:,} of them cut at a loop "
        f"and {made.questions_cut:,} after a question without an end; dropped: {dropped}; of the tokens that "
        f"the target wrote {made.lost_share:.1%} were lost"
    )
    return 0


def amount(text: str) -> int:
    """A number such as 500000, 500k or 10M, for argparse."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmb]?)", text.strip().lower())
    if found is None or float(found[1]) > 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount like 500000, 500k or 10M")
    return int(float(found[1]) * _UNITS[found[2]])


def _shares(text: str) -> dict[str, float]:
    """Names with shares, such as questions:0.6,prompts:0.4, for argparse."""
    try:
        parts = [part.partition(":") for part in text.split(",")]
        return {name.strip(): float(share) if colon else 1.0 for name, colon, share in parts}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like questions:0.6,prompts:0.4") from None


SYNTHESIZE = Command(__doc__, _add_arguments, _run)
