"""The wordings from which prompts are made, in the files of `texts`.

A section of a file begins with `== NAME`. Each line is one wording, with `\\n` for a line break. A wording
that occurs twice is drawn twice as often. Places to fill in are in braces; `{}` is the quoted text.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

_SECTION = "== "


def wordings(file: str, section: str) -> tuple[str, ...]:
    return _read(file)[section]


def sections(file: str, prefix: str) -> dict[str, tuple[str, ...]]:
    """All sections whose names begin with `prefix`, by the rest of their names."""
    return {
        name.removeprefix(prefix): lines for name, lines in _read(file).items() if name.startswith(prefix)
    }


def words(section: str) -> tuple[str, ...]:
    """The words of a section of words.txt, which all kinds share."""
    return wordings("words", section)


def filled(template: str, quoted: str, **values: str) -> str:
    """A wording with its places filled. The quoted text comes last, because it may contain braces."""
    for place, value in values.items():
        template = template.replace(f"{{{place}}}", value)
    return template.replace("{}", quoted)


@cache
def _read(file: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    text = (Path(__file__).parent / "texts" / f"{file}.txt").read_text(encoding="utf-8")
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(_SECTION):
            lines = found.setdefault(line.removeprefix(_SECTION), [])
        elif line:
            lines.append(line.replace("\\n", "\n"))
    return {name: tuple(lines) for name, lines in found.items()}
