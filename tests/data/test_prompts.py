"""Documents and prompts as users make them: the same every time, and nothing that is held out."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path
from typing import Any

import pytest

from longspec.cli.main import main
from longspec.data.held_out import HeldOut
from longspec.data.prompts.make import KINDS
from longspec.data.samples import read_prompt

# What is measured on, as the file of measurements has it and as the book has it.
SECRET = (
    "The harbour master had never seen so many white sails at once, and he counted them twice before he "
    "rang the great bell. By noon every window on the quay was open, and old Captain Merrow was already "
    "asking for his boots."
)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def collected(folder: Path) -> tuple[Path, Path]:
    """Documents of a book with the secret in its middle and of a package; and the file that holds it out."""
    people = ("Anselm", "Brigid", "Corwin", "Delia", "Edmund", "Fenella")
    pages = [
        f'On day {day} the traveller {people[day % 6]} came to {people[day % 5]} and spoke of the road. "It '
        f'is {day * 7} miles to the river," he said, and nobody in the house believed him. They sat by '
        f"the fire until the candles were low, counted {day} stars, and agreed: the bridge must be mended."
        for day in range(900)
    ]
    pages.insert(450, SECRET.replace(" ", "\r\n", 3).upper())
    book = {"title": "A Road", "text": "\r\n\r\n".join(pages)}
    with lzma.open(folder / "books.jsonl.xz", "wt", encoding="utf-8") as file:
        file.write(json.dumps(book) + "\n")
    held_out = folder / "held_out.jsonl"
    records = [{"turns": [f"Summarize this.\n\n{SECRET}"]}, {"turns": ["How do I clean oranges?"]}]
    held_out.write_text("".join(json.dumps(record) + "\n" for record in records))
    documents = folder / "documents.jsonl"
    command = ["data", "collect", "--books", str(folder / "books.jsonl.xz"), "--packages", "jinja2"]
    command += ["--licence", "public domain", "--held-out", str(held_out), "--output", str(documents)]
    assert main(command) == 0
    return documents, held_out


def test_collect_names_licences_and_cuts_out_what_is_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents, _ = collected(tmp_path)
    found = lines_of(documents)
    assert "1 books" in capsys.readouterr().out
    assert {line["licence"] for line in found if line["kind"] == "book"} == {"public domain"}
    assert any("BSD" in line["licence"] for line in found if line["source"] == "jinja2")
    texts = [line["text"] for line in found if line["kind"] == "book"]
    # The book falls into what stands before and after the secret, and loses nothing else.
    assert len(texts) == 2
    assert texts[0].endswith("the bridge must be mended")
    assert texts[1].strip().startswith("On day 450 ")
    assert sum(text.count("the bridge must be mended") for text in texts) == 900


def test_prompts_are_many_the_same_again_and_never_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents, held_out = collected(tmp_path)
    command = ["data", "prompts", "--documents", str(documents), "--held-out", str(held_out)]
    for name, number in {"once": 3000, "again": 3000, "fewer": 500}.items():
        assert main([*command, "--number", str(number), "--output", str(tmp_path / name)]) == 0
    once = (tmp_path / "once").read_bytes()
    assert once == (tmp_path / "again").read_bytes()
    assert once.startswith((tmp_path / "fewer").read_bytes())
    assert main([*command, "--number", "500", "--seed", "1", "--output", str(tmp_path / "other")]) == 0
    assert (tmp_path / "other").read_bytes() != (tmp_path / "fewer").read_bytes()

    found = lines_of(tmp_path / "once")
    assert {line["kind"] for line in found} == {name for name, kind in KINDS.items() if kind.share}
    texts = []
    for line in found:
        messages, turns = read_prompt(line)
        texts.append("\n".join([*(message["content"] for message in messages), *turns]))
    assert len(set(texts)) == 3000
    # No place was left unfilled; sources have braces of their own.
    quoting = {"code", "function_heads"}
    plain = [text for text, line in zip(texts, found, strict=True) if line["kind"] not in quoting]
    assert not [text for text in plain if re.search(r"\{[a-z0-9_]*\}", text)]
    guard = HeldOut.read([str(held_out)])
    assert all(guard.allows(text) for text in texts)
    assert not guard.allows("how do I clean ORANGES?")
    capsys.readouterr()


def test_long_prompts_are_made_on_demand_and_bad_wishes_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents, _ = collected(tmp_path)
    command = ["data", "prompts", "--output", str(tmp_path / "long"), "--number", "40"]
    assert main([*command, "--documents", str(documents), "--kinds", "long_texts:3,essays:1"]) == 0
    found = lines_of(tmp_path / "long")
    assert {line["kind"] for line in found} == {"long_texts", "essays"}
    assert max(len(line["prompt"]) for line in found) > 12_000
    capsys.readouterr()

    assert main([*command, "--kinds", "sonnets"]) == 2
    assert "kind 'sonnets' is unknown; there are: maths" in capsys.readouterr().err
    assert main([*command, "--kinds", "summaries"]) == 2
    assert "'summaries' quotes books" in capsys.readouterr().err
    assert main(["data", "collect", "--packages", "no-such", "--output", str(tmp_path / "none")]) == 2
    assert "package 'no-such' is not installed" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "none"))]
