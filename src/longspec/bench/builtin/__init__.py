"""Prompts that need no download: short ones written for this, long ones made of Python's own library."""

from __future__ import annotations

import json
import sysconfig
from importlib import resources
from pathlib import Path

from longspec.api import LongSpec
from longspec.bench.cut import spliced
from longspec.bench.workloads import Item, Workload
from longspec.errors import UserError

KINDS = ("chat", "code", "maths", "summary", "translation")
SOURCES = ("repo", "text")
# Of the long prompts in the set itself; `repo:N` and `text:N` give any other.
LONG = 2048
# Packages of the standard library whose modules are read one after the other, most readable first.
_PACKAGES = (
    *("json", "logging", "http", "email", "asyncio", "unittest", "importlib", "concurrent", "urllib"),
    *("xml", "multiprocessing", "ctypes", "collections", "html", "wsgiref", "zoneinfo", "curses", "dbm"),
)
_QUESTION = "\n\nSummarise the text above: what is it about, and what are its main rules?"


def builtin_set(model: LongSpec, kind: str | None = None) -> Workload:
    """The set, or one kind of it: two short prompts of each kind and two long prompts."""
    if kind is None:
        short = [item for one in KINDS for item in _written(one)]
        return Workload("builtin", (*short, *(long_item(model, source, LONG) for source in SOURCES)))
    if kind in SOURCES:
        return Workload(f"builtin:{kind}", (long_item(model, kind, LONG),))
    return Workload(f"builtin:{kind}", _written(kind))


def _written(kind: str) -> tuple[Item, ...]:
    text = (resources.files("longspec.bench.builtin") / f"{kind}.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return tuple(Item(line["id"], kind, tuple(line["turns"])) for line in lines)


def long_item(model: LongSpec, source: str, length: int, kind: str | None = None) -> Item:
    """A prompt of exactly `length` tokens.

    repo: modules of the standard library, the last one cut off in its middle, to be continued as it is.
    text: pages of the Python language reference, to be summarised.
    """
    make = _repo if source == "repo" else _text
    return Item(f"{source}-{length}", kind or source, ids=make(model, length))


def _repo(model: LongSpec, length: int) -> tuple[int, ...]:
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [path for name in _PACKAGES for path in sorted((folder / name).glob("*.py"))]
    modules += sorted(folder.glob("*.py"))
    # What is to be completed stands last and the rest before it: a repository, seen from one of its files.
    own = folder / "json" / "decoder.py"
    if own not in modules:
        raise UserError(f"Python's library has no sources in {folder}; give another workload, such as a file")
    code = own.read_text(encoding="utf-8")
    middle = code.index("\n", len(code) // 2) + 1
    ids = _ids(model, f"# File: json/decoder.py\n{code[:middle]}")
    for path in (path for path in modules if path != own):
        if len(ids) >= length:
            break
        name = path.relative_to(folder).as_posix()
        ids = _ids(model, f"# File: {name}\n{path.read_text(encoding='utf-8', errors='replace')}\n") + ids
    return _last(ids, length, "repo")


def _text(model: LongSpec, length: int) -> tuple[int, ...]:
    from pydoc_data.topics import topics

    ids: list[int] = []
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        if len(ids) >= length:
            break
        ids += _ids(model, topics[name] + "\n\n")
    prompt = spliced(model, "Here are pages of a manual.", ids, _QUESTION, length)
    if prompt is None:
        raise UserError(f"text:{length} is longer than the reference, which has {len(ids)} tokens here")
    return prompt


def _ids(model: LongSpec, text: str) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])


def _last(ids: list[int], length: int, source: str) -> tuple[int, ...]:
    if len(ids) < length:
        raise UserError(f"{source}:{length} is longer than what there is, {len(ids)} tokens here")
    return tuple(ids[-length:])
