"""The wordings that prompts are put together from, in the files of `texts`.

A file has sections, each begun by `== NAME`; a line is one wording, with `\\n` for a line break. One that
stands there twice is drawn twice as often. Places to be filled in are in braces, `{}` being what is quoted.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

_SECTION = "== "


def wordings(file: str, section: str) -> tuple[str, ...]:
    return _read(file)[section]


def sections(file: str, prefix: str) -> dict[str, tuple[str, ...]]:
    """All sections whose names begin so, by the rest of their names."""
    return {
        name.removeprefix(prefix): lines for name, lines in _read(file).items() if name.startswith(prefix)
    }


def words(section: str) -> tuple[str, ...]:
    """The words of a section of words.txt, which all kinds share."""
    return wordings("words", section)


def filled(template: str, quoted: str, **values: str) -> str:
    """A wording with its places filled; what is quoted comes last, because it may have braces of its own."""
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
