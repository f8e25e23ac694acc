"""Prompts that quote: summaries, questions, extraction, rewriting, and answers from several passages."""

from __future__ import annotations

from random import Random
from typing import Any

from longspec.data.prompts.library import Library, Maker, names_in
from longspec.data.prompts.wordings import filled, wordings, words

# Characters that a passage takes among others.
_RETRIEVED = 500
# The least and the most questions about a long text. Several cost little more than one, because the target
# reads the text only once.
_LONG_TURNS = (4, 8)
_NO_NAMES = ["the narrator"]


def _filled(rng: Random, template: str, text: str, names: list[str]) -> str:
    """A wording about a text; it may ask about one of the `names`."""
    values = {
        "name": rng.choice(names or _NO_NAMES),
        "n": str(rng.randint(2, 6)),
        "words": str(rng.choice((20, 30, 50, 80, 100))),
        "tone": rng.choice(words("tones")),
        "who": rng.choice(words("audiences")),
    }
    return filled(template, text, **values)


def quoting(section: str, least: int, most: int) -> Maker:
    """Makes prompts about one passage of so many characters."""

    def make(rng: Random, library: Library) -> dict[str, Any]:
        text = library.passage(rng, least, most)
        return {"prompt": _filled(rng, rng.choice(wordings("passages", section)), text, names_in(text)[:4])}

    return make


def rewriting(rng: Random, library: Library) -> dict[str, Any]:
    """A passage, or a sentence or two, to be said otherwise."""
    short = rng.random() < 0.4
    text = " ".join(library.sentence(rng) for _ in range(rng.randint(1, 2))) if short else None
    text = text or library.passage(rng, 300, 1500)
    return {"prompt": _filled(rng, rng.choice(wordings("passages", "rewrite")), text, names_in(text)[:4])}


def retrieval(rng: Random, library: Library) -> dict[str, Any]:
    """Several passages and a question about one of them."""
    texts = _passages(rng, library, rng.randint(2, 5))
    return {"prompt": _retrieve(rng, texts, _names(texts))}


def long_retrieval(rng: Random, library: Library) -> dict[str, Any]:
    """As many passages as fit into a long prompt, and several questions, each about one of them."""
    texts = _passages(rng, library, max(2, library.long_size(rng) // _RETRIEVED))
    names = _names(texts)
    later = (_question(rng, texts, names) for _ in range(rng.randint(*_LONG_TURNS) - 1))
    return {"turns": [_retrieve(rng, texts, names), *dict.fromkeys(later)]}


def _passages(rng: Random, library: Library, number: int) -> list[str]:
    return [library.passage(rng, 250, 700) for _ in range(number)]


def _names(texts: list[str]) -> list[str]:
    return names_in(" ".join(texts))


def _retrieve(rng: Random, texts: list[str], names: list[str]) -> str:
    asked, label = _question(rng, texts, names), rng.choice(wordings("passages", "labels"))
    joined = "\n\n".join(label.format(number) + text for number, text in enumerate(texts, 1))
    return filled(rng.choice(wordings("passages", "retrieve")), joined, q=asked)


def _question(rng: Random, texts: list[str], names: list[str]) -> str:
    """About a name in one of the texts, and perhaps another of the `names` in all of them."""
    own = names_in(rng.choice(texts)) or _NO_NAMES
    asked = rng.choice(wordings("passages", "retrieve_asked"))
    return asked.format(name=rng.choice(own[:3]), other=rng.choice((names or own)[:6]))


def long_texts(rng: Random, library: Library) -> dict[str, Any]:
    """Pages of a book or source files, with a task and then several questions about them."""
    length = library.long_size(rng)
    is_code = library.has_sources and rng.random() < 0.3
    section, text = (
        ("long_code", library.file(rng, length)) if is_code else ("long", library.pages(rng, length))
    )
    first = rng.choice(wordings("passages", section))
    later = rng.sample(wordings("passages", f"{section}_follow"), rng.randint(*_LONG_TURNS) - 1)
    names = names_in(text)[:12]
    return {"turns": [_filled(rng, wording, text, names) for wording in (first, *later)]}
