"""Serve a target over HTTP with OpenAI's interface, and a page to try it at the same address.

It prints the address and a curl line that works. After Ctrl-C it finishes the running answers and ends.

  longspec serve
  longspec serve --target qwq --port 8080 --api-key-file keys.txt
  longspec serve --target qwq --tensor-parallel 2
  longspec serve --target ./my-llama --draft ./my-draft --max-rows 32 --kv-memory 40GB
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from longspec.cli.arguments import (
    add_method_arguments,
    add_model_arguments,
    add_number,
    add_option,
    load,
    options,
)
from longspec.cli.command import Command
from longspec.option import Option

if TYPE_CHECKING:
    from longspec.api import LongSpec


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 is all of them (%(default)s)"
    )
    add_number(group, "--port", 8000, "0 takes a free one")
    group.add_argument(
        "--api-key-file", metavar="PATH", help="file with keys, one a line; requests without one are refused"
    )
    about = "answers that may wait beside those that run; more are refused with status 429"
    add_number(group, "--max-queue", 256, about, least=0)
    add_option(group, Option("max_seconds", float, 600.0, "longest time for a request", metavar="S"))
    about = "at the end, time for the running answers to finish"
    add_option(group, Option("grace_seconds", int, 30, about, least=0, metavar="S"))
    group.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME",
        help="names that requests may give the model; answers have the first one (the target's name)",
    )  # fmt: skip
    add_model_arguments(parser)
    add_method_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    from longspec.server.run import FrontOptions, bind, read_api_keys, serve
    from longspec.server.service import Limits

    method = {name: value for name, value in options(arguments).items() if value is not None}
    limits = Limits(arguments.max_queue, arguments.max_seconds)
    keys = read_api_keys(arguments.api_key_file) if arguments.api_key_file else []

    def load_and_prepare() -> LongSpec:
        model = load(arguments, calibrate=arguments.calibrate)
        model.engine.prepare(model.engine.scheduler.max_rows)
        return model

    host, names = arguments.host, tuple(arguments.served_model_name)
    front = FrontOptions(limits, tuple(keys), method, arguments.grace_seconds, host, names)
    serve(load_and_prepare, bind(host, arguments.port), front)
    return 0


SERVE = Command(__doc__, _add_arguments, _run)
