"""Collect documents for prompts, for continuation and for long contexts: books, and sources of packages."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TextIO

from longspec.atomic import unfinished
from longspec.data.held_out import HeldOut
from longspec.data.records import read_records
from longspec.errors import UserError, lone_surrogate

STDLIB = "stdlib"
BOOK, SOURCE = "book", "source"
# Sources of other sizes are lists of names, tables, or empty.
_LEAST_CHARACTERS, _MOST_CHARACTERS = 1500, 200_000
# A book goes into several documents, so that reading one of them is quick.
_LONGEST_DOCUMENT = 200_000
# Shorter pieces beside a held-out part are dropped.
_LEAST_PIECE = 2000
_LONGEST_LICENCE = 60

Collected = tuple[str, str, str, str]
"""Kind, source, licence, text."""


def collect(
    output: Path, books: Sequence[str], packages: Sequence[str], held_out: HeldOut, licence: str = "unknown"
) -> Counter[str]:
    """Write a JSONL of `text`, `source`, `licence` and `kind`, in a fixed order.

    Returns the number of documents of each kind, of documents with a held-out part cut, and of characters.
    """
    with unfinished(output) as path:
        with open(path, "w", encoding="utf-8") as file:
            made = _write(file, _documents(books, packages, licence), held_out)
        if not made["characters"]:
            raise UserError("there is nothing to collect: give books or packages that hold text")
    return made


def _write(file: TextIO, documents: Iterator[Collected], held_out: HeldOut) -> Counter[str]:
    counts: Counter[str] = Counter()
    for kind, source, under, text in documents:
        pieces = held_out.cut(text)
        kept = pieces if len(pieces) == 1 else [one for one in pieces if len(one) >= _LEAST_PIECE]
        for piece in (short for one in kept for short in _split(one)):
            line = {"text": piece, "source": source, "licence": under, "kind": kind}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            counts["characters"] += len(piece)
        counts["cut"] += pieces != [text]
        counts[kind] += 1
    return counts


def _documents(books: Sequence[str], packages: Sequence[str], licence: str) -> Iterator[Collected]:
    for book in books:
        for _, record in read_records([book]):
            text = record.get("text")
            if not isinstance(text, str) or lone_surrogate(text) is not None:
                raise UserError(f"a record of {book} has no text 'text'")
            source = str(record.get("source", Path(book).name.partition(".")[0]))
            yield BOOK, source, str(record.get("licence", licence)), _plain(text)
    for name in packages:
        under, files = _package(name)
        for path in files:
            text = _plain(path.read_text(encoding="utf-8", errors="replace"))
            if _LEAST_CHARACTERS <= len(text) <= _MOST_CHARACTERS:
                yield SOURCE, name, under, text


def _split(text: str) -> Iterator[str]:
    """Cut at paragraphs into pieces that are not too long."""
    while len(text) > _LONGEST_DOCUMENT:
        end = text.rfind("\n\n", _LONGEST_DOCUMENT // 2, _LONGEST_DOCUMENT)
        end = end + 2 if end > 0 else _LONGEST_DOCUMENT
        yield text[:end]
        text = text[end:]
    yield text


def _plain(text: str) -> str:
    """The text with one kind of line end, and without white space at the end of lines."""
    return re.sub(r"[ \t]+\n", "\n", text.replace("\r\n", "\n").replace("\r", "\n"))


def _package(name: str) -> tuple[str, list[Path]]:
    """The licence and the Python sources of an installed package, without tests."""
    if name == STDLIB:
        folder = Path(sysconfig.get_path("stdlib"))
        names = [path.relative_to(folder) for path in folder.rglob("*.py")]
        licence = f"PSF-2.0 (Python {sys.version_info.major}.{sys.version_info.minor})"
    else:
        try:
            package = metadata.distribution(name)
        except (metadata.PackageNotFoundError, ValueError) as error:
            raise UserError(f"package {name!r} is not installed here; leave it out") from error
        folder = Path(str(package.locate_file("")))
        names = [Path(file) for file in package.files or [] if file.suffix == ".py"]
        licence = _licence(package)
    wanted = [
        one for one in names if not any("test" in part or part == "site-packages" for part in one.parts)
    ]
    return licence, [folder / one for one in sorted(wanted) if (folder / one).is_file()]


def _licence(package: metadata.Distribution) -> str:
    """The licence in the package's metadata, in the newest form that they have."""
    about = package.metadata
    if told := about.get_all("License-Expression"):
        return str(told[0])
    told = (about.get_all("License") or [""])[0]  # a name, or the whole text
    if 0 < len(told) <= _LONGEST_LICENCE and "\n" not in told:
        return str(told)
    classifiers = [one for one in about.get_all("Classifier") or [] if one.startswith("License")]
    return classifiers[0].rpartition(" :: ")[2] if classifiers else "unknown"
