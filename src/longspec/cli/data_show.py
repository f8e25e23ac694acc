"""Show sequences of a dataset as text, with documents and roles made visible.

longspec data show data/base
longspec data show data/cot --index 12 --count 2
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from longspec.cli.terminal import printable

if TYPE_CHECKING:
    from longspec.data.shards import Packed

_COLOURS = {"PAD": "90", "PROMPT": "36", "REASONING": "33", "TEXT": "0"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec data show`."""
    parser.add_argument("folder", metavar="FOLDER", help="a finished dataset")
    parser.add_argument("--index", type=int, default=0, metavar="N", help="first sequence (%(default)s)")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="how many (%(default)s)")
    parser.add_argument("--target", metavar="MODEL", help="whose tokenizer (default: the one that made it)")
    parser.add_argument("--offline", action="store_true", help="use only what is on disk")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from pathlib import Path

    from longspec.data.shards import Dataset
    from longspec.errors import UserError

    dataset = Dataset(Path(arguments.folder))
    if not 0 <= arguments.index < len(dataset):
        raise UserError(f"--index is {arguments.index}; the dataset's sequences are 0 to {len(dataset) - 1}")
    if arguments.count < 1:
        raise UserError(f"--count is {arguments.count}; it must be at least 1")
    tokenizer = _tokenizer(dataset, arguments)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for index in range(arguments.index, min(arguments.index + arguments.count, len(dataset))):
        _show(index, dataset[index], tokenizer, colour)
    return 0


def _tokenizer(dataset: Any, arguments: argparse.Namespace) -> Any:
    """The tokenizer that made the dataset, or the one asked for if it is the same."""
    from longspec.data.shards import tokenizer_fingerprint
    from longspec.errors import UserError
    from longspec.hub import resolve_tokenizer
    from longspec.prompts import PromptEncoder

    made_by = dataset.info.made_by
    target = arguments.target or made_by.get("target")
    if not isinstance(target, str):
        raise UserError(f"{arguments.folder} does not say whose tokens it holds: name it with --target")
    revision = None if arguments.target else made_by.get("revision")
    files = resolve_tokenizer(target, revision=revision, offline=arguments.offline)
    tokenizer = PromptEncoder(files.folder).tokenizer
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    dataset.check(max(vocab_size, dataset.info.vocab_size), tokenizer_fingerprint(tokenizer), target)
    return tokenizer


def _show(index: int, one: Packed, tokenizer: Any, colour: bool) -> None:
    from longspec.data.survey import spans

    print(_paint(f"━━ sequence {index}: {len(one.tokens):,} tokens", "1", colour))
    document = -1
    for span in spans(one):
        name = span.role.name
        if span.document != document:
            document = span.document
            what = "padding" if name == "PAD" else f"document {document + 1}"
            print(_paint(f"── {what} from token {one.starts[document]:,}", "1", colour))
        label = f"[{name.lower()} {len(span.tokens):,}]"
        if name == "PAD":
            print(_paint(label, _COLOURS[name], colour))
            continue
        print(_paint(label, "2", colour))
        # What a tokenizer decodes can hold escape sequences; those are shown, not obeyed.
        print(_paint(printable(tokenizer.decode(span.tokens)), _COLOURS[name], colour))


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text
