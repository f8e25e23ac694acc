"""Bad command lines, made from the parser's own definition: exit code 2 and one line each."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

import pytest

from longspec.cli.main import _parser, main

BAD = (
    *(
        "",
        " ",
        "x",
        "-",
        "--",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "-1",
        "0",
        "1.5",
        "1,2,",
        ",",
        "é\x1b[31m",
        "\0",
    ),
    *("9" * 400, "9" * 5000, "-" + "9" * 400, "0x10", "١٢", "1_000", "\n", "'", "/nonexistent/x", "none"),
)


def commands(
    parser: argparse.ArgumentParser, names: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command with its parser."""
    below = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    for one in below:
        for name, inner in one.choices.items():
            yield from commands(inner, (*names, name))
    if not below:
        yield names, parser


def bad_lines(seed: int) -> Iterator[list[str]]:
    """Typed flags with values that are none, flags that do not exist, flags without their value."""
    rng = random.Random(seed)
    known = [one for one in commands(_parser()) if one[0] not in (("train",), ("completion",))]
    while True:
        names, parser = rng.choice(known)
        flags = [one for one in parser._actions if one.option_strings and one.nargs != 0]
        needed = [
            part
            for one in parser._actions
            if one.required
            for part in ([one.option_strings[0], "1"] if one.option_strings else ["/nonexistent/x"])
        ]
        form, flag = rng.randrange(4), rng.choice(flags) if flags else None
        if form == 0 or flag is None:
            yield [
                *names,
                *needed,
                f"--{rng.choice(['colour', 'x', 'max-ngrams', 'top_k', ''])}{rng.choice(BAD)}x",
            ]
        elif form == 1:
            yield [*names, *needed, flag.option_strings[0]]
        else:
            yield [
                *names,
                *needed,
                "--target",
                "/nonexistent/x",
                f"{flag.option_strings[0]}={rng.choice(BAD)}",
            ]


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_bad_command_lines(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lines = bad_lines(seed=count)
    for line in (next(lines) for _ in range(count)):
        try:
            code = main(line)
        except SystemExit as exit:
            code = int(exit.code or 0)
        said = capfd.readouterr()
        assert code == 2, (line, said)
        assert said.err.count("\n") == 1, (line, said.err)
        assert said.err.startswith("longspec: error: "), (line, said.err)
        assert all(letter.isprintable() or letter == "\n" for letter in said.err), (line, said.err)
