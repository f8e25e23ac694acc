"""Flags that several commands share, and how they become a model and options."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, cast

from longspec.config import DEFAULT_TREE
from longspec.decoding.methods import Auto
from longspec.decoding.methods.registry import all_options, choices
from longspec.decoding.option import Option, options_of
from longspec.decoding.sampling import Sampling
from longspec.errors import UserError

if TYPE_CHECKING:
    from longspec.api import LongSpec
    from longspec.options import Options

DEFAULT_TARGET = "smollm2-135m"


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
    """Where a target may come from."""
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument("--offline", action="store_true", help="use only what is on disk")


def add_device(group: argparse._ActionsContainer) -> None:
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    group.add_argument(
        "--dtype",
        default="auto",
        help="auto, float32, bfloat16 or float16 (default: bfloat16 on a GPU, float32 on a CPU)",
    )


def add_weights(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--weights",
        default="auto",
        metavar="TYPE",
        help="of the target's weights: auto (as --dtype), or on a CPU float16, bfloat16, int8 or int4, which "
        "decode faster and change the words a little (default: %(default)s)",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which target, and how it is run."""
    group = parser.add_argument_group("model")
    add_target(group)
    group.add_argument(
        "--draft",
        metavar="DRAFT",
        help="draft folder, .pth file, hub id, or the short name of a target whose draft comes with longspec "
        "(default: the target's own; 'none' for none)",
    )
    add_device(group)
    add_weights(group)
    group.add_argument(
        "--draft-dtype",
        default="auto",
        metavar="TYPE",
        help="of the draft's weights: int8, target (as the target's), or auto: int8 on a CPU (default)",
    )
    group.add_argument(
        "--attention",
        default="auto",
        metavar="NAME",
        help="auto (triton on a GPU), torch, triton or reference",
    )
    group.add_argument(
        "--max-length",
        type=whole_number,
        metavar="N",
        help="limit on prompt plus answer (default: the model's)",
    )
    add_size_arguments(group)


def add_size_arguments(parser: argparse._ActionsContainer) -> None:
    """How large the engine is."""
    parser.add_argument(
        "--max-rows",
        type=positive_number,
        metavar="N",
        help="prompts that run at once (default: 128, on a CPU 16)",
    )
    parser.add_argument(
        "--kv-memory",
        type=_num_bytes,
        metavar="SIZE",
        help="memory for the KV of all prompts, such as 8GB or 512MB (default: what is free, in part)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="in half precision on a GPU: the same words by every method, whatever runs beside",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen and when to stop."""
    group = parser.add_argument_group("sampling (what is not given follows the model's generation_config)")
    group.add_argument(
        "--max-new-tokens",
        type=whole_number,
        metavar="N",
        help="longest answer (default: what fits, at most 512)",
    )
    for one in options_of(Sampling).values():
        _add_option(group, one, one.help)
    group.add_argument(
        "--seed",
        type=whole_number,
        metavar="N",
        help="of sampling: the same seed gives the same text (default: a new one)",
    )
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; repeatable"
    )
    group.add_argument(
        "--ignore-eos",
        dest="eos_ids",
        action="store_const",
        const=(),
        help="go on past the model's end-of-answer tokens",
    )


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """How the target is sped up. None of this changes what it says."""
    group = parser.add_argument_group(
        "decoding method (changes the speed, never the words: every method says what vanilla says)"
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
        default = "none" if one.default is None else one.format(one.default)
        _add_option(group, one, f"{', '.join(owners)}: {one.help} (default: {default})")
    group.add_argument(
        "--no-calibrate",
        dest="calibrate",
        action="store_false",
        help="auto: do not measure this machine, go by defaults",
    )


def _add_option(group: argparse._ActionsContainer, option: Option, about: str) -> None:
    """The flag of an option; None where it is not given."""

    def read(text: str) -> Any:
        try:
            return option.parse(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    group.add_argument(
        f"--{option.name.replace('_', '-')}",
        type=read,
        metavar={int: "N", float: "X"}.get(option.type, "N,N,..."),
        help=about,
    )


def add_tree_shape(parser: argparse._ActionsContainer, default: tuple[int, ...] | None = None) -> None:
    """The flag of a tree's shape; where it may be left unsaid, whoever reads it knows the default."""
    shown = ",".join(map(str, DEFAULT_TREE))
    parser.add_argument(
        "--tree-shape",
        type=whole_numbers,
        default=default,
        metavar="N,N,...",
        help=f"nodes per depth of the tree ({shown})",
    )


def whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 4,16,16") from None


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def positive_number(text: str) -> int:
    """A count of which there must be at least one."""
    if (found := whole_number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return found


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 0,0.7,1.0") from None


def _num_bytes(text: str) -> int:
    """A size in bytes, or with a unit behind it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if found is None or found[2] == "i" or not 0 < float(found[1]) < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 8GB, 512MB or 1.5GiB")
    base = 1024 if found[2].endswith("i") else 1000
    return int(float(found[1]) * base ** (" kmgt".index(found[2][:1] or " ")))


def load(arguments: argparse.Namespace, calibrate: bool, max_rows: int | None = None) -> LongSpec:
    """The model that the flags name; it is measured only where `calibrate` says that method auto will run.

    `max_rows` is how many prompts the command answers at once, where no flag says otherwise: fewer rows are
    measured and captured sooner.
    """
    from longspec.api import LongSpec

    return LongSpec.from_pretrained(
        arguments.target,
        arguments.draft,
        dtype=arguments.dtype,
        device=arguments.device,
        max_length=arguments.max_length,
        revision=arguments.revision,
        offline=arguments.offline,
        progress=True,
        calibrate=calibrate,
        attention=arguments.attention,
        draft_dtype=arguments.draft_dtype,
        weights=arguments.weights,
        max_rows=arguments.max_rows or max_rows,
        kv_memory=arguments.kv_memory,
        exact=arguments.exact,
    )


def options(arguments: argparse.Namespace) -> Options:
    """The options that the flags give. Checked here, so that a bad value is told before a long load."""
    from longspec.options import Options, read_options

    known = {*Options.__annotations__, *all_options()}
    given = {name: value for name, value in vars(arguments).items() if name in known}
    read_options(given)
    return cast("Options", given)
