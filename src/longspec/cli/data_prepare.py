"""Tokenise text and pack it into a dataset of sequences of one length.

Inputs are JSONL files (plain, .gz, .xz, .zst), parquet files, folders of them, and folders that Hugging Face
datasets wrote with save_to_disk. They are streamed. A run that was stopped goes on where it was when the same
command is given again.

plain text, one {"text": ...} per line, cut into sequences of 1024 tokens:
  longspec data prepare books.jsonl.xz --output data/base --licence "public domain"

a corpus with its origin in each record, by 16 processes:
  longspec data prepare SlimPajama-6B --output data/slim --workers 16 --source-field meta.redpajama_set_name

long documents, one per sequence of 32k:
  longspec data prepare long/ --output data/long --seq-length 32768 --pack single --min-tokens 8192

conversations, never cut:
  longspec data prepare chats.parquet --output data/chat --align sharegpt --template messages --pack whole

questions with a chain of thought, whose fields have other names:
  longspec data prepare math.jsonl --output data/cot --template cot --pack whole --seq-length 32768 \\
      --rename problem=question --rename solution=answer --rename thoughts=reasoning --think

the first thousand records to measure on, the rest to train on:
  longspec data prepare text.jsonl --output data/valid --limit 1000
  longspec data prepare text.jsonl --output data/train --skip 1000

templates: text (text), source_target (source, target), prompt_answer (prompt, answer), messages (messages),
  cot (question, reasoning, answer), ids (ids, prompt_ids)
aligners: id (adds one), alpaca (instruction, input, output to prompt, answer), sharegpt (conversations to
  messages), think (an answer with <think> to reasoning, answer)
packing: stream (documents joined, cut at sequence ends), whole (documents stay whole, fitted into sequences),
  single (one document per sequence)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from longspec.cli.arguments import DEFAULT_TARGET
from longspec.cli.terminal import printable

if TYPE_CHECKING:
    from longspec.data.prepare import Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec data prepare`."""
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files and folders, read in this order")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="where the dataset goes")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    _add_tokenizer_arguments(parser.add_argument_group("tokenizer (the target's weights are not needed)"))
    _add_record_arguments(parser.add_argument_group("records"))
    _add_sequence_arguments(parser.add_argument_group("sequences"))


def _add_tokenizer_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="MODEL",
        help="whose tokens: short name, hub id, folder or .gguf file (default: %(default)s)",
    )
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument("--offline", action="store_true", help="use only what is on disk")


def _add_record_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--template", default="text", metavar="NAME", help="see above (default: %(default)s)")
    group.add_argument("--align", action="append", default=[], metavar="NAME", help="see above; repeatable")
    group.add_argument(
        "--rename", action="append", type=_pair, default=[], metavar="OLD=NEW", help="a field; repeatable"
    )
    group.add_argument("--think", action="store_true", help="cot: put reasoning between <think> and </think>")
    group.add_argument("--split", metavar="NAME", help="of a save_to_disk folder that has several")
    group.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N records")
    group.add_argument("--limit", type=int, metavar="N", help="then take at most N records")
    group.add_argument(
        "--min-tokens", type=int, default=2, metavar="N", help="drop shorter documents (default: %(default)s)"
    )
    group.add_argument("--skip-bad", action="store_true", help="count bad records and files, and go on")
    group.add_argument("--licence", default="unknown", help="of the text (default: %(default)s)")
    group.add_argument(
        "--licence-field", metavar="FIELD", help="where a record says its own, like meta.licence"
    )
    group.add_argument(
        "--source-field", metavar="FIELD", help="where a record says its origin (input's name)"
    )


def _add_sequence_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--seq-length", type=int, default=1024, metavar="N", help="tokens per sequence (default: %(default)s)"
    )
    group.add_argument("--pack", default="stream", metavar="NAME", help="see above (default: %(default)s)")
    group.add_argument(
        "--truncate", action="store_true", help="whole, single: drop what of a document exceeds a sequence"
    )
    group.add_argument(
        "--shard-sequences", type=int, metavar="N", help="sequences per shard (default: 8 million tokens)"
    )
    group.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that tokenise; the result does not depend on it (default: one per core, %(default)s)",
    )


def _pair(text: str) -> tuple[str, str]:
    old, mark, new = text.partition("=")
    if not (old and mark and new):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form OLD=NEW")
    return old, new


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from pathlib import Path

    from longspec.data.prepare import Options, prepare

    own = {"inputs", "output", "align", "rename", "json", "debug", "command", "data_command"}
    plain = {name: value for name, value in vars(arguments).items() if name not in own}
    options = Options(
        inputs=tuple(arguments.inputs),
        folder=Path(os.path.expanduser(arguments.output)),
        renames=tuple(arguments.rename),
        aligners=tuple(arguments.align),
        **plain,
    )
    summary = prepare(options, progress=True)
    if arguments.json:
        print(json.dumps(asdict(summary)))
    else:
        _tell(summary)
    return 0


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _tell(summary: Summary) -> None:
    if summary.already:
        print(f"{printable(summary.folder)} is done already")
    print(
        f"{_number(summary.sequences, 'sequence')} with {_number(summary.tokens, 'token')} of "
        f"{_number(summary.documents, 'document')} in {_number(summary.shards, 'shard')}, "
        f"{summary.padding_share:.1%} padding"
    )
    for source in summary.sources:
        what = f"{source['name']} ({source['licence']}): {_number(source['num_tokens'], 'token')}"
        print(f"  from {printable(what)} of {_number(source['num_documents'], 'document')}")
    if summary.short:
        print(f"  left out as too short: {_number(summary.short, 'document')}")
    if summary.bad:
        print(f"longspec: warning: left out {_number(summary.bad, 'bad record')}, first:", file=sys.stderr)
        for place in summary.bad_places:
            print(f"  {printable(place)}", file=sys.stderr)
    if not summary.already:
        print(f"  {summary.seconds:.1f} s in all, {summary.tokens_per_second:,.0f} tokens/s")
