"""Prompts that ask for explanations, lists, letters, stories, advice, small tasks and reports. Some of them
have a system message or several turns."""

from __future__ import annotations

import re
from random import Random
from typing import Any

from longspec.data.prompts.library import Library, Maker
from longspec.data.prompts.wordings import wordings, words

# An article before a vowel, but for words like "university" and "one".
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeio])(?!one|eu)")
_PLACE = re.compile(r"\{([a-z0-9]+)\}")
_SINGLE = {
    "a": "names",
    "b": "names",
    "who": "audiences",
    "things": "things",
    "things2": "things",
    "place": "places",
    "job": "jobs",
    "job2": "jobs",
    "product": "products",
    "dish": "dishes",
    "tone": "tones",
    "genre": "genres",
    "hero": "characters",
    "where": "settings",
    "adj": "adjectives",
    "vessel": "vessels",
}


def _drawn(rng: Random, *names: str) -> str:
    """A wording of one of these sections, its places filled."""
    template = rng.choice([one for name in names for one in wordings("writing", name)])
    topics = (*words("science"), *words("society"), *(words("tech") if rng.random() < 0.5 else ()))
    first, second = rng.sample(topics, 2)
    values = {place: rng.choice(words(section)) for place, section in _SINGLE.items()}
    values |= {"t": first, "t2": second, "n": str(rng.randint(3, 9))}
    # The place `{}` is left for the caller.
    filled = _PLACE.sub(lambda found: values[found[1]], template)
    return _ARTICLE.sub(r"\1n ", filled)


def _asked(rng: Random, section: str) -> dict[str, Any]:
    prompt = _drawn(rng, section)
    for around in ("openings", "endings"):
        prompt = _drawn(rng, around).format(prompt) if rng.random() < 0.4 else prompt
    return {"prompt": prompt}


def asking(section: str) -> Maker:
    """Makes prompts of a section's wordings."""
    return lambda rng, library: _asked(rng, section)


def essays(rng: Random, library: Library) -> dict[str, Any]:
    """A prompt that asks for a long answer."""
    return {"prompt": _drawn(rng, "essays")}


def reports(rng: Random, library: Library) -> dict[str, Any]:
    """News, minutes, transcripts: texts with names and figures, which other prompts can then quote."""
    return {"prompt": _drawn(rng, "reports")}


def roles(rng: Random, library: Library) -> dict[str, Any]:
    """A system message, and then a question."""
    asked = _drawn(rng, "explain", "advice", "lists", "letters", "tasks")
    return {
        "messages": [{"role": "system", "content": _drawn(rng, "system")}, {"role": "user", "content": asked}]
    }


def conversations(rng: Random, library: Library) -> dict[str, Any]:
    """Two to four turns."""
    first = _drawn(rng, "explain", "advice", "lists", "letters", "stories", "tasks")
    return {"turns": [first, *(_drawn(rng, "follow") for _ in range(rng.randint(1, 3)))]}
