"""Show what a dataset holds: sequences, tokens, padding, roles, and where the text is from.

longspec data info data/base
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from longspec.cli.terminal import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec data info`."""
    parser.add_argument("folder", metavar="FOLDER", help="a finished dataset")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from pathlib import Path

    from longspec.data.shards import Dataset
    from longspec.data.survey import survey

    found = survey(Dataset(Path(arguments.folder)))
    if arguments.json:
        print(json.dumps(asdict(found)))
        return 0
    info = found.info
    print(f"{printable(arguments.folder)}: {info.num_sequences:,} sequences of {info.seq_length:,} tokens")
    print(f"  tokens      {info.num_tokens:,}, {found.num_different:,} different of {info.vocab_size:,}")
    print(f"  documents   {found.num_documents:,}, counted anew in each sequence")
    shares = ", ".join(f"{name} {share:.1%}" for name, share in found.role_shares.items() if share)
    print(f"  roles       {shares}")
    print(f"  shards      {info.num_shards}")
    print(f"  tokenizer   {info.tokenizer or 'unknown'}")
    print("  sources")
    for source in info.sources:
        what = f"{source.name} ({source.licence})"
        print(f"    {printable(what)}: {source.num_tokens:,} tokens of {source.num_documents:,} documents")
    print("  made by")
    for name, value in info.made_by.items():
        if value not in (None, [], False):
            print(f"    {printable(f'{name}: {value}')}")
    return 0
