"""Quotations for prompts: passages, sentences and names from books, functions and files from sources."""

from __future__ import annotations

import ast
import bisect
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from longspec.data.collect import SOURCE
from longspec.data.records import read_records
from longspec.errors import UserError

# A sentence: from a capital to its full stop, without headings, verse and tables.
_SENTENCE = re.compile(r"(?<![\w.])[A-Z][^.!?\n|*_#\[\]]{30,220}[.!?](?=[\s\"'])")
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{2,}(?: [A-Z][a-z]{2,})?")
_LONGEST_PARSED = 80_000
_TRIES = 50
# Characters of a long prompt: the fewest, and the most unless a caller says otherwise.
_SHORTEST_LONG, LONGEST = 4_000, 26_000


@dataclass(frozen=True)
class Function:
    """A documented function of a source file, without the code around it."""

    name: str
    head: str
    """From `def` to the end of its docstring."""
    whole: str


class Library:
    """The documents that `collect` wrote, to quote from at random."""

    def __init__(self, paths: Sequence[str], longest: int = LONGEST) -> None:
        """`longest` is the most characters that a long prompt quotes."""
        self._longest = longest
        books: list[str] = []
        sources: list[str] = []
        for _, record in read_records(paths):
            text = record.get("text")
            if not isinstance(text, str):
                raise UserError(f"a record of {', '.join(paths)} has no text 'text'")
            (sources if record.get("kind") == SOURCE else books).append(text)
        self._books, self._sources = _Shelf(books), _Shelf(sources)
        self._functions: dict[int, list[Function]] = {}

    @property
    def has_books(self) -> bool:
        return bool(self._books.texts)

    @property
    def has_sources(self) -> bool:
        return bool(self._sources.texts)

    def long_size(self, rng: Random) -> int:
        """The number of characters of a long prompt; each doubling up to the longest is equally likely."""
        least = min(_SHORTEST_LONG, self._longest / 4)
        return int(least * (self._longest / least) ** rng.random())

    def passage(self, rng: Random, least: int, most: int) -> str:
        """Whole paragraphs of a book, the last one cut at a sentence; `least` to `most` characters."""
        for _ in range(_TRIES):
            wanted = rng.randint(least, most)
            text, place = self._books.draw(rng)
            begin = text.find("\n\n", place, place + 4000)
            piece = text[begin + 2 : begin + 2 + wanted].strip() if begin >= 0 else ""
            ends = [piece.rfind(mark) for mark in (". ", ".\n", '."', "! ", "? ")]
            piece = piece[: max(ends) + 1] + ('"' if max(ends) == ends[2] >= 0 else "")
            if len(piece) >= least * 0.8 and piece.count("|") + piece.count("#") < 4:
                return piece
        return self.pages(rng, most)  # the texts have no such paragraphs

    def pages(self, rng: Random, characters: int) -> str:
        """A long part of one book that begins at a paragraph; if the text is short, several texts joined."""
        text, place = self._books.draw(rng)
        if len(text) <= characters:
            return self._books.joined(rng, characters)
        place = min(place, len(text) - characters)
        begin = text.find("\n\n", place, place + 4000) + 2 if place else 0
        return text[max(begin, 0) : max(begin, 0) + characters].strip()

    def sentence(self, rng: Random) -> str:
        """One sentence of at most two lines or so."""
        for _ in range(_TRIES):
            text, place = self._books.draw(rng)
            found = _SENTENCE.search(text, place, place + 3000)
            if found:
                return found[0]
        return " ".join(self.pages(rng, 200).split())  # the texts have no sentences

    def file(self, rng: Random, characters: int) -> str:
        """A part of a source file that begins at a line's start; if the file is short, several files."""
        text, place = self._sources.draw(rng)
        if len(text) < characters // 2:
            return self._sources.joined(rng, characters).rsplit("\n", 1)[0]
        if rng.random() < 0.5 or len(text) <= characters:
            return text[:characters].rsplit("\n", 1)[0]
        begin = text.find("\n", min(place, len(text) - characters)) + 1
        return text[begin : begin + characters].rsplit("\n", 1)[0]

    def function(self, rng: Random) -> Function:
        """A documented function that fits on a screen or two."""
        for _ in range(_TRIES):
            index = rng.randrange(len(self._sources.texts))
            if index not in self._functions:
                self._functions[index] = _functions_of(self._sources.texts[index])
            if self._functions[index]:
                return rng.choice(self._functions[index])
        raise UserError("the sources have hardly any documented functions; collect other packages")


Maker = Callable[[Random, Library], dict[str, Any]]
"""Makes a prompt of one kind: a record with `prompt`, `turns` or `messages`."""


class _Shelf:
    """Texts from which places are drawn; each character is equally likely."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self._ends = list(itertools.accumulate(map(len, texts)))

    def draw(self, rng: Random) -> tuple[str, int]:
        place = rng.randrange(self._ends[-1])
        index = bisect.bisect_right(self._ends, place)
        return self.texts[index], place - (self._ends[index - 1] if index else 0)

    def joined(self, rng: Random, characters: int) -> str:
        """Texts one after the other, the last one cut."""
        parts, size = [], 0
        while size < characters:
            parts.append(rng.choice(self.texts).strip())
            size += len(parts[-1]) + 2
        return "\n\n".join(parts)[:characters]


def names_in(text: str) -> list[str]:
    """People and places that a passage names, most frequent first."""
    return [name for name, _ in Counter(_NAME.findall(text)).most_common()]


def _functions_of(text: str) -> list[Function]:
    if len(text) > _LONGEST_PARSED:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in old sources
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []  # sources for another Python
    lines, found = text.split("\n"), []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2 or node.name.startswith("__"):
            continue
        first, last = node.body[0], node.end_lineno
        doc = ast.get_docstring(node)
        if not doc or first.end_lineno is None or last is None or not 20 <= len(doc) <= 1200:
            continue
        whole = _dedented(lines[node.lineno - 1 : last])
        head = _dedented(lines[node.lineno - 1 : first.end_lineno])
        if len(whole) <= 4000 and first.end_lineno < last:
            found.append(Function(node.name, head, whole))
    return found


def _dedented(lines: list[str]) -> str:
    """The lines with the indentation that they would have at the top level of a file."""
    margin = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[margin:] if not line[:margin].strip() else line for line in lines)
