"""Prompts by shares of kinds. The seed and the number of a prompt decide what it is."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from longspec.atomic import unfinished
from longspec.data.held_out import HeldOut
from longspec.data.prompts import code, functions, language, maths, passages, writing
from longspec.data.prompts.library import Library, Maker
from longspec.errors import UserError

# How often another prompt is tried in place of one that occurred before or is held out.
_TRIES = 100
# How often a prompt of the user is answered, at different temperatures.
_OWN_TIMES = 3


@dataclass(frozen=True)
class Kind:
    """A kind of prompt."""

    make: Maker
    share: float
    """Its default share of all prompts; a kind with 0 is made only if a caller asks for it."""
    needs_books: bool = False


KINDS: dict[str, Kind] = {
    "maths": Kind(maths.maths, 8),
    "code": Kind(code.code_tasks, 9),
    "function_heads": Kind(functions.function_heads, 9),
    "summaries": Kind(passages.quoting("summarise", 500, 3000), 12, needs_books=True),
    "extraction": Kind(passages.quoting("extract", 300, 1800), 4, needs_books=True),
    "rewriting": Kind(passages.rewriting, 5, needs_books=True),
    "questions_on_text": Kind(passages.quoting("ask", 300, 2200), 5, needs_books=True),
    "retrieval": Kind(passages.retrieval, 6, needs_books=True),
    "translation": Kind(language.translation, 11),
    "sentences": Kind(language.sentence_work, 5),
    "explanations": Kind(writing.asking("explain"), 7),
    "lists": Kind(writing.asking("lists"), 5),
    "letters": Kind(writing.asking("letters"), 4),
    "stories": Kind(writing.asking("stories"), 4),
    "advice": Kind(writing.asking("advice"), 5),
    "tasks": Kind(writing.asking("tasks"), 7),
    "structured": Kind(writing.asking("json"), 4),
    "reports": Kind(writing.reports, 3),
    "roles": Kind(writing.roles, 3),
    "conversations": Kind(writing.conversations, 6),
    "essays": Kind(writing.essays, 0),
    "long_texts": Kind(passages.long_texts, 0, needs_books=True),
    "long_retrieval": Kind(passages.long_retrieval, 0, needs_books=True),
}


@dataclass(frozen=True)
class Made:
    """What `make_prompts` wrote."""

    counts: dict[str, int]
    """Prompts of each kind."""
    num_characters: int
    num_held_out: int
    """Prompts that were left out because they share text with held-out prompts."""
    num_repeated: int


def make_prompts(
    output: Path,
    number: int,
    library: Library,
    held_out: HeldOut,
    shares: Mapping[str, float] | None = None,
    seed: int = 0,
    own: Sequence[dict[str, Any]] = (),
) -> Made:
    """Write a JSONL of `number` different prompts: `id`, `kind`, and `prompt`, `turns` or `messages`.

    `own` are the user's prompts. They are half of the lines, but none comes more than `_OWN_TIMES`.
    """
    names, weights = _shares(shares, library)
    if number < 1:
        raise UserError(f"number is {number}; it must be at least 1")
    counts: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    seen: set[bytes] = set()
    characters = 0
    with unfinished(output) as path, open(path, "w", encoding="utf-8") as file:
        for index in range(number):
            rng = Random(f"{seed} {index}")
            if index % 2 and index // 2 < _OWN_TIMES * len(own):
                kind, record = "own", own[index // 2 % len(own)]
            else:
                kind = rng.choices(names, weights)[0]
                record = _fresh(rng, kind, library, held_out, seen, dropped)
            line = json.dumps(record | {"id": f"{kind}-{index}", "kind": kind}, ensure_ascii=False)
            file.write(line + "\n")
            counts[kind] += 1
            characters += len(line)
    return Made(dict(counts.most_common()), characters, dropped["held out"], dropped["repeated"])


def _fresh(
    rng: Random, kind: str, library: Library, held_out: HeldOut, seen: set[bytes], dropped: Counter[str]
) -> dict[str, Any]:
    """A prompt that has not occurred yet and shares no text with held-out ones."""
    for _ in range(_TRIES):
        record = KINDS[kind].make(rng, library)
        texts = _texts(record)
        key = hashlib.blake2b("\n".join(texts).encode(), digest_size=8).digest()
        if key in seen:
            dropped["repeated"] += 1
        elif not all(held_out.allows(text) for text in texts):
            dropped["held out"] += 1
        else:
            seen.add(key)
            return record
    raise UserError(
        f"no more different prompts of kind {kind!r} are found; ask for fewer, or give more documents"
    )


def _texts(record: dict[str, Any]) -> list[str]:
    if "messages" in record:
        return [message["content"] for message in record["messages"]]
    return record["turns"] if "turns" in record else [record["prompt"]]


def _shares(shares: Mapping[str, float] | None, library: Library) -> tuple[list[str], list[float]]:
    """Kinds and weights; by default all kinds that the documents allow."""
    if shares is None:
        allowed = {name: kind for name, kind in KINDS.items() if library.has_books or not kind.needs_books}
        shares = {name: kind.share for name, kind in allowed.items() if kind.share}
    for name, share in shares.items():
        if name not in KINDS:
            raise UserError(f"kind {name!r} is unknown; there are: {', '.join(KINDS)}")
        if not 0 <= share < float("inf"):
            raise UserError(f"kind {name}:{share}: a share from 0 up is needed")
        if share and KINDS[name].needs_books and not library.has_books:
            raise UserError(f"kind {name!r} quotes books; give documents that have some")
    if not sum(shares.values()):
        raise UserError("all shares of the kinds are 0; give one a share")
    return list(shares), list(shares.values())
