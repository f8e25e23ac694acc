"""Programming tasks: write, explain, mend, test and translate code."""

from __future__ import annotations

from random import Random
from typing import Any

from longspec.data.prompts.library import Library
from longspec.data.prompts.wordings import filled, wordings, words


def code_tasks(rng: Random, library: Library) -> dict[str, Any]:
    chance = rng.random()
    if chance < 0.2 and library.has_sources:
        function = library.function(rng)
        asked = rng.choice(wordings("code", "about"))
        return {"prompt": filled(asked, function.whole, name=function.name)}
    if chance < 0.25:
        query, tables = rng.choice(wordings("code", "queries")), rng.choice(wordings("code", "tables"))
        return {"prompt": rng.choice(wordings("code", "sql")).format(d=query, t=tables)}
    values = {
        "s": rng.choice(wordings("code", "given")),
        "r": rng.choice(wordings("code", "result")),
        "l": rng.choice(wordings("code", "languages")),
        "f": rng.choice(wordings("code", "forms")),
        "e": " " + rng.choice(wordings("code", "extra")) if rng.random() < 0.75 else "",
        "t": rng.choice(words("tech")),
    }
    values["d"] = rng.choice(wordings("code", "verbs")).format(**values)
    return {"prompt": rng.choice(wordings("code", "other" if chance < 0.4 else "write")).format(**values)}
