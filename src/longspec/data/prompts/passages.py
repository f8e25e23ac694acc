"""Prompts that quote: summaries, questions, extraction, rewriting, and answers from several passages."""

from __future__ import annotations

from random import Random
from typing import Any

from longspec.data.prompts.library import Library, Maker, names_in
from longspec.data.prompts.wordings import filled, wordings, words

# Characters that a passage takes among others.
_RETRIEVED = 500


def _filled(rng: Random, template: str, text: str) -> dict[str, Any]:
    names = names_in(text) or ["the narrator"]
    values = {
        "name": rng.choice(names[:4]),
        "n": str(rng.randint(2, 6)),
        "words": str(rng.choice((20, 30, 50, 80, 100))),
        "tone": rng.choice(words("tones")),
        "who": rng.choice(words("audiences")),
    }
    return {"prompt": filled(template, text, **values)}


def quoting(section: str, least: int, most: int) -> Maker:
    """Makes prompts about one passage of so many characters."""

    def make(rng: Random, library: Library) -> dict[str, Any]:
        return _filled(rng, rng.choice(wordings("passages", section)), library.passage(rng, least, most))

    return make


def rewriting(rng: Random, library: Library) -> dict[str, Any]:
    """A passage, or a sentence or two, to be said otherwise."""
    short = rng.random() < 0.4
    text = " ".join(library.sentence(rng) for _ in range(rng.randint(1, 2))) if short else None
    return _filled(rng, rng.choice(wordings("passages", "rewrite")), text or library.passage(rng, 300, 1500))


def retrieval(rng: Random, library: Library) -> dict[str, Any]:
    """Several passages and a question about one of them."""
    return _retrieve(rng, library, rng.randint(2, 5))


def long_retrieval(rng: Random, library: Library) -> dict[str, Any]:
    """As many passages as fit into a long prompt, and a question about one of them."""
    return _retrieve(rng, library, max(2, library.long_size(rng) // _RETRIEVED))


def _retrieve(rng: Random, library: Library, number: int) -> dict[str, Any]:
    texts = [library.passage(rng, 250, 700) for _ in range(number)]
    names = names_in(rng.choice(texts)) or ["the narrator"]
    others = names_in(" ".join(texts)) or names
    asked = rng.choice(wordings("passages", "retrieve_asked")).format(
        name=rng.choice(names[:3]), other=rng.choice(others[:6])
    )
    label = rng.choice(wordings("passages", "labels"))
    joined = "\n\n".join(label.format(number) + text for number, text in enumerate(texts, 1))
    return {"prompt": filled(rng.choice(wordings("passages", "retrieve")), joined, q=asked)}


def long_texts(rng: Random, library: Library) -> dict[str, Any]:
    """Pages of a book or source files, and what to do with them."""
    length = library.long_size(rng)
    if library.has_sources and rng.random() < 0.3:
        return _filled(rng, rng.choice(wordings("passages", "long_code")), library.file(rng, length))
    return _filled(rng, rng.choice(wordings("passages", "long")), library.pages(rng, length))
