"""Word problems and sums, of many shapes and numbers."""

from __future__ import annotations

from random import Random
from typing import Any

from longspec.data.prompts.library import Library
from longspec.data.prompts.wordings import wordings, words


def maths(rng: Random, library: Library) -> dict[str, Any]:
    problem = rng.choice(wordings("maths", "stories" if rng.random() < 0.7 else "plain"))
    return {"prompt": rng.choice(wordings("maths", "asked")).format(problem.format(**_values(rng, problem)))}


def _values(rng: Random, problem: str) -> dict[str, Any]:
    """Values for the places of a problem: small numbers y and z, larger x, big ones, prices, times."""
    y, z = rng.randint(2, 25), rng.randint(2, 12)
    chickens, rabbits = rng.randint(3, 40), rng.randint(3, 40)
    first, second = rng.sample(words("names"), 2)
    return {
        "a": first,
        "b": second,
        "c": rng.choice(words("places")),
        "t": rng.choice(words("things")),
        "y": y,
        "z": z,
        # In problems about legs, the number of animals must match the number of legs.
        "x": chickens + rabbits if "{legs}" in problem else rng.randint(20, 150),
        "legs": 2 * chickens + 4 * rabbits,
        "x2": rng.randint(20, 100),
        "big": rng.randint(151, 2000),
        "small": rng.randint(2, 7),
        "p": f"{rng.randint(1, 60)}.{rng.choice(('25', '50', '75', '99', '00'))}",
        "q": rng.choice(range(5, 80, 5)),
        "h": rng.randint(6, 21),
        "m": rng.choice(range(0, 60, 5)),
        "s": rng.choice(range(60, 200, 10)),
        **{"y2": 2 * y, "y4": 4 * y, "y8": 8 * y},
        **{"sum": y + z, "product": y * z, "square": (y + z) ** 2},
    }
