"""Measure this machine, side by side in one run.

longspec bench vanilla                 vanilla decoding against transformers' generate
longspec bench vanilla --context 4096 --target ./my-model
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from longspec.cli.arguments import add_model_arguments, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `longspec bench`."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    vanilla = kinds.add_parser("vanilla", help="vanilla decoding against transformers' generate")
    vanilla.add_argument("--context", type=int, default=512, metavar="N", help="prompt tokens (%(default)s)")
    vanilla.add_argument("--new-tokens", type=int, default=48, metavar="N", help="tokens made (%(default)s)")
    vanilla.add_argument("--repeats", type=int, default=5, metavar="N", help="timed runs each (%(default)s)")
    vanilla.add_argument("--json", action="store_true", help="print one JSON object")
    vanilla.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    add_model_arguments(vanilla)
    vanilla.set_defaults(draft="none", calibrate=False)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from longspec.bench.vanilla import Timing, compare
    from longspec.errors import UserError
    from longspec.hub import resolve
    from longspec.progress import count_bar

    for name in ("context", "repeats"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} is {getattr(arguments, name)}; it must be at least 1")
    if arguments.new_tokens < 2:
        raise UserError(f"--new-tokens is {arguments.new_tokens}; it must be at least 2")
    # The one that transformers is to load, fetched before anything is timed.
    folder = resolve(arguments.target, revision=arguments.revision, offline=arguments.offline).folder
    with count_bar("runs", arguments.repeats) as advance:
        result = compare(
            load(arguments), folder, arguments.context, arguments.new_tokens, arguments.repeats, advance
        )
    if arguments.json:
        ratios = {"decode_ratio": result.decode_ratio, "prefill_ratio": result.prefill_ratio}
        print(json.dumps(asdict(result) | ratios))
        return 0
    about = ", ".join(f"{name} {value}" for name, value in result.environment.items())
    print(f"{result.context} tokens of context, {result.new_tokens} new; {about}")

    def line(name: str, timing: Timing) -> str:
        spread = f"{timing.token_least * 1e3:.1f} to {timing.token_most * 1e3:.1f}"
        speed = f"{1 / timing.token:7.1f} tokens/s"
        return f"{name:13} {speed}   {timing.token * 1e3:6.1f} ms ({spread})   prefill {timing.prefill:.2f} s"

    print(line("longspec", result.ours))
    print(line("transformers", result.theirs))
    same = "the same tokens" if result.same_tokens else "DIFFERENT tokens"
    print(
        f"longspec decodes {result.decode_ratio:.2f} times as fast and prefills {result.prefill_ratio:.2f} "
        f"times as fast; both said {same}"
    )
    return 0
