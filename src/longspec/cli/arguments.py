"""Flags that several commands share, and the model and options made from them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from longspec.decoding.methods import Auto
from longspec.decoding.methods.registry import all_options, choices
from longspec.decoding.sampling import Sampling
from longspec.errors import UserError
from longspec.hub.registry import DEFAULT_TARGET
from longspec.option import Option, num_bytes, options_of

if TYPE_CHECKING:
    from longspec.api import LongSpec
    from longspec.options import Options

_METAVARS = {int: "N", float: "X", str: "NAME", Path: "FILE"}


def add_target(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="MODEL",
        help="short name (see `longspec models`), hub id, Hugging Face folder or .gguf file "
        "(default: %(default)s)",
    )
    add_source(group)


def add_source(group: argparse._ActionsContainer) -> None:
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument("--offline", action="store_true", help="use only what is on disk")


def add_device(group: argparse._ActionsContainer) -> None:
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    group.add_argument(
        "--dtype",
        default="auto",
        help="auto, float32, bfloat16 or float16 (default: bfloat16 on a GPU, float32 on a CPU)",
    )


def add_tensor_parallel(group: argparse._ActionsContainer) -> None:
    add_number(
        group,
        "--tensor-parallel",
        1,
        "processes that hold the target together, each on a device of its own; --device may name them "
        "(cuda:0,cuda:2)",
        least=1,
    )


def add_weights(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--weights",
        default="auto",
        metavar="TYPE",
        help="number format of the target's weights: auto (as the file has them), on a CPU float16, "
        "bfloat16, int8 or int4, on a GPU int8 or fp8: these decode faster and change the words a little "
        "(default: %(default)s)",
    )


def add_kv_dtype(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--kv-dtype",
        default="auto",
        metavar="TYPE",
        help="number format of keys and values: auto (the dtype), or on a GPU fp8: half the bytes, and the "
        "words change a little (default: %(default)s)",
    )


def add_model_arguments(parser: argparse.ArgumentParser, rows: str = "128, on a CPU 16") -> None:
    """`rows` says how many prompts the command answers at once by itself."""
    group = parser.add_argument_group("model")
    add_target(group)
    group.add_argument(
        "--draft",
        metavar="DRAFT",
        help="draft folder, .pth file, hub id, or the short name of a target whose draft comes with longspec "
        "(default: the target's own draft; 'none': no draft)",
    )
    add_device(group)
    add_tensor_parallel(group)
    add_weights(group)
    group.add_argument(
        "--draft-dtype",
        default="auto",
        metavar="TYPE",
        help="number format of the draft's weights: int8, target (the target's dtype), or auto: int8 on a "
        "CPU, on a GPU like the target's weights (default: %(default)s)",
    )
    group.add_argument(
        "--attention",
        default="auto",
        metavar="NAME",
        help="auto (triton on a GPU), torch, triton or reference",
    )
    add_number(group, "--max-length", None, "limit on prompt plus answer (default: the model's)")
    add_size_arguments(group, rows)


def add_size_arguments(parser: argparse._ActionsContainer, rows: str = "128, on a CPU 16") -> None:
    add_number(parser, "--max-rows", None, f"prompts that run at once (default: {rows})", least=1)
    parser.add_argument(
        "--kv-memory",
        type=_num_bytes,
        metavar="SIZE",
        help="memory for the KV of all prompts, on each rank, such as 8GB (default: 85%% of a GPU's free "
        "memory, 50%% of a CPU's)",
    )
    add_kv_dtype(parser)
    parser.add_argument(
        "--exact",
        action="store_true",
        help="in half precision on a GPU: the same words by every method, whatever runs beside",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults come from the model's generation_config)")
    add_number(group, "--max-new-tokens", None, "longest answer (default: what fits, at most 512)")
    for one in options_of(Sampling).values():
        add_option(group, one, default=None)
    add_number(group, "--seed", None, "for sampling: the same seed gives the same text (default: a new one)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; repeatable"
    )
    group.add_argument(
        "--ignore-eos",
        dest="eos_ids",
        action="store_const",
        const=(),
        help="continue after the model's end-of-answer tokens",
    )


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "decoding method (changes only the speed: every method gives the same words as vanilla)"
    )
    described = "; ".join(f"{name}: {choice.summary}" for name, choice in choices().items())
    group.add_argument(
        "--method",
        default=Auto.name,
        choices=list(choices()),
        metavar="NAME",
        help=f"{described} (default: %(default)s)",
    )
    group.add_argument(
        "--acceptance",
        help="coupled: the same tokens as vanilla (default); rejection: the same distribution when sampling",
    )
    for one, owners in all_options().values():
        default = "none" if one.default is None else _shown(one.default)
        add_option(group, one, default=None, help=f"{', '.join(owners)}: {one.help} (default: {default})")
    group.add_argument(
        "--no-calibrate",
        dest="calibrate",
        action="store_false",
        help="auto: do not measure this machine, use default costs",
    )


def add_options(group: argparse._ActionsContainer, cls: type, *names: str) -> None:
    known = options_of(cls)
    for name in names:
        add_option(group, known[name])


def add_option(group: argparse._ActionsContainer, option: Option, *flags: str, **changes: Any) -> None:
    """The flag of an option; `changes` are argparse's, such as another default."""

    def read(text: str) -> Any:
        try:
            return option.check(option.parse(text))
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    default = changes.get("default", option.default)
    plain = default is None or option.type is bool
    about = option.help if plain else f"{option.help} (default: {_shown(default)})"
    settings: dict[str, Any] = {"dest": option.name, "default": default, "help": about}
    if option.type is bool:
        settings["action"] = "store_true"
    else:
        settings |= {"type": read, "metavar": option.metavar or _METAVARS.get(option.type, "N,N,...")}
    group.add_argument(*(flags or (f"--{option.name.replace('_', '-')}",)), **(settings | changes))


def _shown(default: Any) -> Any:
    return ",".join(f"{one:g}" for one in default) if isinstance(default, tuple) else default


def add_number(
    group: argparse._ActionsContainer, flag: str, default: int | None, help: str, least: int | None = None
) -> None:
    """A flag for a whole number."""
    name = flag.removeprefix("--").replace("-", "_")
    add_option(group, Option(name, int, default, help, least), flag)


def _num_bytes(text: str) -> int:
    try:
        return num_bytes("kv_memory", text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def given_path(text: str) -> Path:
    """A path, for argparse. An empty one would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name a file or a folder")
    return Path(text)


def given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The values of those flags that have one of these names."""
    known = set(names)
    return {name: value for name, value in vars(arguments).items() if name in known}


def will_calibrate(arguments: argparse.Namespace) -> bool:
    """Whether method auto will run and may measure this machine."""
    return arguments.calibrate and arguments.method == Auto.name


def load(arguments: argparse.Namespace, calibrate: bool, max_rows: int | None = None) -> LongSpec:
    """The model that the flags name. `calibrate` measures this machine for method auto.

    `max_rows` is how many prompts the command answers at once, if no flag says it: fewer rows take less time
    to measure and capture.
    """
    from longspec.api import LongSpec

    own = given(arguments, signature(LongSpec.from_pretrained).parameters)
    own |= {"calibrate": calibrate, "max_rows": arguments.max_rows or max_rows}
    return LongSpec.from_pretrained(**own, progress=True)


def options(arguments: argparse.Namespace) -> Options:
    """The options from the flags, checked here so that a bad value is refused before a long load."""
    from longspec.options import Options, read_options

    own = given(arguments, {*Options.__annotations__, *all_options()})
    read_options(own)
    return cast("Options", own)
