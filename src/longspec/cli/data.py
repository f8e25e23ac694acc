"""`longspec data`: make training data, and look at it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from longspec.cli.arguments import (
    add_json,
    add_number,
    add_option,
    add_options,
    add_target,
    given,
    given_path,
)
from longspec.cli.command import Command, add_commands
from longspec.cli.synthesize import SYNTHESIZE
from longspec.cli.terminal import in_colour, printable
from longspec.data.options import PrepareOptions
from longspec.option import options_of

if TYPE_CHECKING:
    from longspec.data.prepare import PrepareSummary
    from longspec.data.shards import Packed

_ABOUT = """\
Make training data, and look at it.

longspec data prepare text.jsonl --output data     tokenise and pack text
longspec data synthesize --output own --tokens 1M  let the target write it
longspec data info data                            the figures and sources of a dataset
longspec data show data --index 3                  a sequence as readable text
"""
_PREPARE = """\
Tokenise text and pack it into a dataset of sequences of one length.

Inputs are JSONL files (plain, .gz, .xz, .zst), parquet files, folders of them, and folders that Hugging Face
datasets wrote with save_to_disk. They are streamed. To continue a run that was stopped, give the same command
again.

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
_INFO = """\
Show the figures of a dataset: sequences, tokens, padding, roles, and where the text is from.

longspec data info data/base
"""
_SHOW = """\
Show sequences of a dataset as text, with documents and roles made visible.

longspec data show data/base
longspec data show data/cot --index 12 --count 2
"""
_COLOURS = {"PAD": "90", "PROMPT": "36", "REASONING": "33", "TEXT": "0"}


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files and folders, read in this order")
    parser.add_argument(
        "-o", "--output", required=True, type=given_path, metavar="FOLDER", help="where the dataset goes"
    )
    add_json(parser)
    add_target(parser.add_argument_group("tokenizer (the target's weights are not needed)"))
    group = parser.add_argument_group("records")
    group.add_argument("--align", action="append", default=[], metavar="NAME", help="see above; repeatable")
    group.add_argument(
        "--rename", action="append", type=_pair, default=[], metavar="OLD=NEW", help="a field; repeatable"
    )
    add_options(group, PrepareOptions, "template", "think", "split", "skip", "limit", "min_tokens")
    add_options(group, PrepareOptions, "skip_bad", "licence", "licence_field", "source_field")
    group = parser.add_argument_group("sequences")
    add_options(group, PrepareOptions, "seq_length", "pack", "truncate", "shard_sequences")
    # One for each core.
    add_option(group, options_of(PrepareOptions)["workers"], default=len(os.sched_getaffinity(0)))


def _pair(text: str) -> tuple[str, str]:
    old, mark, new = text.partition("=")
    if not (old and mark and new):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form OLD=NEW")
    return old, new


def _prepare(arguments: argparse.Namespace) -> int:
    from longspec.data.prepare import prepare

    own = given(arguments, (field.name for field in fields(PrepareOptions)))
    own |= {"inputs": tuple(arguments.inputs), "folder": arguments.output.expanduser()}
    own |= {"renames": tuple(arguments.rename), "aligners": tuple(arguments.align)}
    options = PrepareOptions(**own)
    summary = prepare(options, progress=True)
    if arguments.json:
        print(json.dumps(asdict(summary)))
    else:
        _tell(summary)
    return 0


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _tell(summary: PrepareSummary) -> None:
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
        refused = _number(summary.bad, "refused record")
        print(f"longspec: warning: left out {refused}, first:", file=sys.stderr)
        for place in summary.bad_places:
            print(f"  {printable(place)}", file=sys.stderr)
    if not summary.already:
        print(f"  {summary.seconds:.1f} s in all, {summary.tokens_per_second:,.0f} tokens/s")


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=given_path, metavar="FOLDER", help="a finished dataset")
    add_json(parser)


def _info(arguments: argparse.Namespace) -> int:
    from longspec.data.shards import Dataset
    from longspec.data.survey import survey

    found = survey(Dataset(arguments.folder))
    if arguments.json:
        print(json.dumps(asdict(found)))
        return 0
    info = found.info
    print(
        f"{printable(str(arguments.folder))}: {info.num_sequences:,} sequences of {info.seq_length:,} tokens"
    )
    print(f"  tokens      {info.num_tokens:,}, {found.num_different:,} different of {info.vocab_size:,}")
    print(f"  documents   {found.num_documents:,}, counted again in each sequence")
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


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=given_path, metavar="FOLDER", help="a finished dataset")
    add_number(parser, "--index", 0, "first sequence", least=0)
    add_number(parser, "--count", 1, "how many", least=1)
    parser.add_argument("--target", metavar="MODEL", help="whose tokenizer (default: the one that made it)")
    parser.add_argument("--offline", action="store_true", help="use only what is on disk")


def _show(arguments: argparse.Namespace) -> int:
    from longspec.data.shards import Dataset
    from longspec.errors import UserError

    dataset = Dataset(arguments.folder)
    if arguments.index >= len(dataset):
        raise UserError(f"--index is {arguments.index}; the dataset's sequences are 0 to {len(dataset) - 1}")
    tokenizer = _tokenizer(dataset, arguments)
    colour = in_colour()
    for index in range(arguments.index, min(arguments.index + arguments.count, len(dataset))):
        _show_one(index, dataset[index], tokenizer, colour)
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


def _show_one(index: int, one: Packed, tokenizer: Any, colour: bool) -> None:
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
        # Decoded text can have escape sequences; the terminal must show them, not obey them.
        print(_paint(printable(tokenizer.decode(span.tokens)), _COLOURS[name], colour))


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


_COMMANDS = {
    "prepare": Command(_PREPARE, _add_prepare, _prepare),
    "synthesize": SYNTHESIZE,
    "info": Command(_INFO, _add_info, _info),
    "show": Command(_SHOW, _add_show, _show),
}


DATA = Command(_ABOUT, lambda parser: add_commands(parser, _COMMANDS, "data_command"))
