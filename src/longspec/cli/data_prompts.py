"""Make prompts of many kinds for the target to answer: a draft is good at what its target was seen writing.

Kinds: maths, code, function_heads, summaries, extraction, rewriting, questions_on_text, retrieval,
translation, sentences, explanations, lists, letters, stories, advice, roles, conversations; and, where they
are asked for by name, essays (for long answers) and long_texts (up to some 7,000 tokens).

longspec data prompts --documents documents.jsonl --number 400k --output prompts.jsonl
longspec data prompts --documents documents.jsonl --number 20k --kinds long_texts --output long.jsonl
longspec data synthesize --mode prompts --prompts prompts.jsonl --output data/own --tokens 100M

A prompt is decided by --seed and its number: the same command gives the same file, a larger --number the same
prompts first. What is quoted comes from --documents, as `longspec data collect` writes them. Nothing that
shares some 80 characters in a row with a text of --held-out is used.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from longspec.cli.data_synthesize import amount, shares


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec data prompts`."""
    add = parser.add_argument
    add("--output", required=True, type=Path, metavar="FILE", help="the JSONL to write")
    add("--number", required=True, type=amount, metavar="N", help="how many, such as 5000 or 400k")
    add(
        "--documents",
        nargs="+",
        default=[],
        metavar="FILE",
        help="what may be quoted, with 'text' and 'kind'",
    )
    add(
        "--kinds",
        type=shares,
        metavar="KIND[:SHARE],...",
        help="(default: all but essays and long_texts, by shares that suit a general draft)",
    )
    add("--held-out", nargs="+", default=[], metavar="FILE", help="texts that must not be in the output")
    add("--seed", type=int, default=0, help="another one gives other prompts (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object instead of the summary")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from dataclasses import asdict

    from longspec.data.held_out import HeldOut
    from longspec.data.prompts.library import Library
    from longspec.data.prompts.make import make_prompts
    from longspec.progress import count_bar

    library, held_out = Library(arguments.documents), HeldOut.read(arguments.held_out)
    with count_bar("prompts", arguments.number) as advance:
        made = make_prompts(
            *(arguments.output, arguments.number, library, held_out, arguments.kinds, arguments.seed), advance
        )
    if arguments.json:
        print(json.dumps(asdict(made)))
        return 0
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in made.counts.items())
    print(
        f"{arguments.output}: {sum(made.counts.values()):,} prompts, {made.num_characters / 1e6:,.1f} "
        f"million characters; left out: {made.num_repeated:,} repeated, {made.num_held_out:,} held out"
    )
    print(f"  {kinds}")
    return 0
