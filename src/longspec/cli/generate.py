"""Answer one prompt, streaming the text.

The last line, on stderr, has the figures. tau is the number of tokens per round: the target runs once per
round, and vanilla emits one token each time.

longspec generate "Why is the sky blue?"
longspec generate --file report.txt --max-new-tokens 200
cat report.txt | longspec generate --temperature 0.7 --seed 1
longspec generate --raw "Once upon a time" --json
longspec generate --method lookup --explain "Say it twice: red lorry, yellow lorry."
longspec generate --compare "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from longspec.cli.arguments import (
    add_json,
    add_method_arguments,
    add_model_arguments,
    add_sampling_arguments,
    load,
    options,
    will_calibrate,
)
from longspec.cli.command import Command
from longspec.decoding.methods.registry import all_options

if TYPE_CHECKING:
    from longspec.api import LongSpec
    from longspec.generation import Generation
    from longspec.options import Options

# How many answers of each --compare times. The fastest counts, because disturbances only slow down.
_TURNS = 2


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="*", help="the prompt, in quotes; without it, --file or standard input is read"
    )
    parser.add_argument("--file", metavar="PATH", help="read the prompt from a UTF-8 file")
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text as it is")
    add_json(parser)
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print the answer at the end, with a mark on each token: the depth at which it was drafted and "
        "accepted, or none if it is the target's own",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help=f"afterwards, time {_TURNS} more answers each of the method and of vanilla, and print how much "
        "faster the method is",
    )
    add_model_arguments(parser, rows="1")
    add_sampling_arguments(parser)
    add_method_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    from longspec.cli.terminal import figures, write
    from longspec.errors import UserError

    for flag in ("explain", "compare"):
        if arguments.json and getattr(arguments, flag):
            raise UserError(f"--{flag} is for people and --json for machines; give one of them")
    prompt = _read_prompt(arguments)
    chosen = options(arguments)
    model = load(arguments, calibrate=will_calibrate(arguments), max_rows=1)
    if arguments.json:
        print(json.dumps(model.generate(prompt, **chosen).to_json()))
        return 0
    if arguments.explain:
        result = model.generate(prompt, **chosen)
        _explain(result, model.tokenizer)
    else:
        with model.stream(prompt, **chosen) as stream:
            for piece in stream:
                write(piece)
        write("\n")
        result = stream.result
    print(figures(result), file=sys.stderr)
    if arguments.compare:
        _compare(model, prompt, chosen | {"seed": result.seed}, result)
    return 0


def _compare(model: LongSpec, prompt: str, chosen: Options, result: Generation) -> None:
    """Print how much faster the method decodes than vanilla, and whether the answers are the same."""
    from longspec.progress import count_bar

    if result.tokens < 2:
        print("[nothing to compare: the first token comes from reading the prompt]", file=sys.stderr)
        return
    print(f"[comparing: {_TURNS} more answers each by {result.method} and by vanilla]", file=sys.stderr)
    own, plain = [], []
    others = {name: value for name, value in chosen.items() if name not in all_options()}
    vanilla = cast("Options", others | {"method": "vanilla"})
    with count_bar("answers", 2 * _TURNS) as advance:
        for _ in range(_TURNS):
            own.append(model.generate(prompt, **chosen))
            advance(1)
            plain.append(model.generate(prompt, **vanilla))
            advance(1)
    fast, slow = (max(one.decode_tokens_per_second for one in answers) for answers in (own, plain))
    same = all(one.token_ids == result.token_ids for one in (*own, *plain))
    print(
        f"[without the time of the prompt: {result.method} {fast:.1f} tokens/s, vanilla {slow:.1f}: "
        f"{fast / slow:.2f} times as fast; {'the same answer' if same else 'the answers differ'}]",
        file=sys.stderr,
    )


def _explain(result: Generation, tokenizer: Any) -> None:
    from longspec.cli.terminal import explained, in_colour, legend
    from longspec.text import pieces_of

    colour, shown, pieces = in_colour(), 0, []
    for piece in pieces_of(tokenizer, result.token_ids):
        # The tokens may include a stop string, which is not part of the text.
        pieces.append(piece[: len(result.text) - shown])
        shown += len(pieces[-1])
    print(explained(pieces, result.depths, colour))
    print(legend(colour), file=sys.stderr)


def _read_prompt(arguments: argparse.Namespace) -> str:
    from longspec.errors import UserError

    if len(arguments.prompt) > 1:
        words = " ".join(arguments.prompt)
        raise UserError(f'the prompt is {len(arguments.prompt)} arguments; put it in quotes: "{words}"')
    if arguments.prompt and arguments.file is not None:
        raise UserError("give the prompt as an argument or with --file, not both")
    try:
        if arguments.prompt:
            text = str(arguments.prompt[0])
        elif arguments.file is not None:
            text = Path(arguments.file).read_text(encoding="utf-8")
        elif sys.stdin.isatty():
            raise UserError('there is no prompt; try: longspec generate "Why is the sky blue?"')
        else:
            text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        source = arguments.file or "standard input"
        raise UserError(f"{source} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise UserError(f"cannot read {arguments.file or 'standard input'}: {error.strerror}") from error
    if not text.strip():
        raise UserError("the prompt is empty; give some text")
    return text


GENERATE = Command(__doc__, _add_arguments, _run)
