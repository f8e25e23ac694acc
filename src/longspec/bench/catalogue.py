"""Workloads by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longspec.api import LongSpec
from longspec.bench import builtin, published
from longspec.bench.cut import cut_items
from longspec.bench.workloads import Workload, read_file
from longspec.errors import UserError

# In tokens, of prompts that are made to length.
SHORTEST = 64


def load_workload(name: str, model: LongSpec, data: Path | None = None) -> Workload:
    """The workload called `name`; `data` is the folder of the files of published benchmarks.

    builtin, builtin:KIND, repo:N and text:N (a prompt of N tokens), longbench:TASK, aime, or a JSONL file.
    """
    check_name(name)
    head, _, rest = name.partition(":")
    if head == "builtin":
        return builtin.builtin_set(model, rest or None)
    if head in builtin.SOURCES:
        return Workload(name, (builtin.long_item(model, head, int(rest)),))
    if head == "longbench":
        return published.longbench(model, rest, data)
    return published.aime(data) if name == "aime" else read_file(Path(name))


def check_name(name: str) -> None:
    """Refuse what is no workload. It needs no model, so a wrong name is told before a long load."""
    head, _, rest = name.partition(":")
    if head == "builtin" and rest and rest not in (*builtin.KINDS, *builtin.SOURCES):
        kinds = ", ".join((*builtin.KINDS, *builtin.SOURCES))
        raise UserError(f"workload {name!r}: the built-in kinds are {kinds}")
    if head in builtin.SOURCES and (not rest.isdecimal() or int(rest) < SHORTEST):
        raise UserError(
            f"workload {name!r}: give the prompt's length in tokens, {SHORTEST} or more: {head}:4096"
        )
    if head == "longbench" and rest not in published.TASKS:
        raise UserError(f"LongBench task {rest!r} is unknown; there are: {', '.join(published.TASKS)}")
    known = head in ("builtin", "longbench", *builtin.SOURCES) or name == "aime"
    if not known and not Path(name).is_file():
        raise UserError(
            f"workload {name!r} is unknown and no file; there are: builtin, builtin:KIND, repo:N, text:N, "
            "longbench:TASK, aime, and the paths of JSONL files"
        )


def context_workload(
    model: LongSpec, source: str, lengths: Sequence[int] | None, max_new_tokens: int, limit: int = 1
) -> Workload:
    """Prompts of each length, each length a kind of its own; None is 1024, doubled up to the model's limit.

    Of the built-in sources there is one prompt of each length, of a file there are up to `limit`.
    """
    check_source(source)
    if lengths is None:
        limit = model.engine.max_length - max_new_tokens
        lengths = [2**power for power in range(10, 40) if 2**power < limit] + [limit]
    short = next((length for length in lengths if length < SHORTEST), None)
    if short is not None:
        raise UserError(f"a prompt of {short} tokens is asked for; {SHORTEST} is the shortest")
    if source in builtin.SOURCES:
        items = [builtin.long_item(model, source, length, str(length)) for length in lengths]
        return Workload("context", tuple(items))
    items = [item for length in lengths for item in cut_items(model, Path(source), length, limit)]
    return Workload(Path(source).name.partition(".")[0], tuple(items))


def check_source(source: str) -> None:
    """Refuse what no long prompts can be made of, before a long load."""
    if source not in builtin.SOURCES and not Path(source).is_file():
        raise UserError(
            f"--source {source!r} is unknown and no file; there are: {', '.join(builtin.SOURCES)}, and the "
            "paths of JSONL files with 'context' and 'input', or 'text'"
        )
