"""Translation and other work on sentences, in several languages."""

from __future__ import annotations

from random import Random
from typing import Any

from longspec.data.prompts.library import Library
from longspec.data.prompts.wordings import filled, sections, wordings, words


def _english(rng: Random, library: Library) -> str:
    """One to four sentences, of a book or of every day."""
    if library.has_books and rng.random() < 0.6:
        return " ".join(library.sentence(rng) for _ in range(rng.choice((1, 1, 1, 2, 3, 4))))
    return " ".join(_daily(rng) for _ in range(rng.choice((1, 1, 2, 3))))


def _daily(rng: Random) -> str:
    first, second = rng.sample(words("names"), 2)
    values = {name: rng.choice(lines) for name, lines in sections("language", "fill ").items()}
    values |= {
        "a": first,
        "b": second,
        "c": rng.choice(words("places")),
        "n": str(rng.randint(2, 12)),
        "t": rng.choice(words("things")),
    }
    return rng.choice(wordings("language", "daily")).format(**values)


def translation(rng: Random, library: Library) -> dict[str, Any]:
    """From English, into English, and back again."""
    language = rng.choice(wordings("language", "languages"))
    chance = rng.random()
    if chance < 0.2:
        known, lines = rng.choice(list(sections("language", "in ").items()))
        text = " ".join(rng.sample(lines, rng.choice((1, 1, 2, 3))))
        return {"prompt": filled(rng.choice(wordings("language", "from")), text, k=known, l=language)}
    prompt = filled(rng.choice(wordings("language", "into")), _english(rng, library), l=language)
    if chance < 0.3:
        other = rng.choice(wordings("language", "languages"))
        then = (
            "Now translate it back to English.",
            f"And in {other}?",
            "Say it more politely.",
            "Explain it word by word.",
        )
        return {"turns": [prompt, rng.choice(then)]}
    return {"prompt": prompt}


def sentence_work(rng: Random, library: Library) -> dict[str, Any]:
    """Grammar, spelling, completion, sorting of words."""
    text = _english(rng, library)
    parts = text.split()
    half = " ".join(parts[: max(3, len(parts) // 2)])
    listed = ", ".join(rng.sample([*words("things"), *words("places"), *words("names")], rng.randint(3, 7)))
    place = rng.randrange(len(parts))
    bad = " ".join([*parts[:place], parts[place][::-1], *parts[place + 1 :]]).lower()
    bare = text.lower().replace(",", "").replace(".", "")
    word, tone = rng.choice(parts).strip('.,;:"!?').lower(), rng.choice(words("tones"))
    template = rng.choice(wordings("language", "sentences"))
    return {
        "prompt": filled(template, text, half=half, list=listed, bad=bad, bare=bare, word=word, tone=tone)
    }
