"""Collect documents to work with: books of yours and the sources of installed packages.

One JSONL with 'text', 'source', 'licence' and 'kind' per document: what `data prompts` quotes from, what
`data synthesize --mode documents` continues, and what `data prepare` packs for long contexts. Whatever also
stands in a file of --held-out is cut out, about 80 characters in a row being enough.

longspec data collect --books books.jsonl.xz --licence "public domain" --output documents.jsonl
longspec data collect --packages stdlib,numpy --held-out tests.jsonl --output documents.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec data collect`."""
    add = parser.add_argument
    add("--output", required=True, type=Path, metavar="FILE", help="the JSONL to write")
    add("--books", nargs="+", default=[], metavar="FILE", help="files with 'text', as for `data prepare`")
    add(
        "--packages",
        type=_names,
        default=[],
        metavar="NAME,...",
        help="installed packages, whose licences are noted; stdlib is Python's own library",
    )
    add("--held-out", nargs="+", default=[], metavar="FILE", help="texts that must not be in the output")
    add("--licence", default="unknown", help="of the books that do not say theirs (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object instead of the summary")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from dataclasses import asdict

    from longspec.data.collect import collect
    from longspec.data.held_out import HeldOut

    held_out = HeldOut.read(arguments.held_out)
    made = collect(arguments.output, arguments.books, arguments.packages, held_out, arguments.licence)
    if arguments.json:
        print(json.dumps(asdict(made)))
        return 0
    print(
        f"{arguments.output}: {made.num_books:,} books and {made.num_sources:,} sources, "
        f"{made.num_characters / 1e6:,.1f} million characters; {made.num_cut:,} lost what is held out"
    )
    for source, licence in made.licences.items():
        print(f"  {source}: {licence}")
    return 0
