"""The documents and prompts of the recipe: the same every time, and nothing that is held out."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path
from typing import Any

import pytest

from longspec import UserError
from longspec.data.collect import collect
from longspec.data.held_out import HeldOut
from longspec.data.prompts.library import Library
from longspec.data.prompts.make import KINDS, make_prompts
from longspec.data.records import read_prompt

# What is measured on, as the file of measurements has it and as the book has it.
SECRET = (
    "The harbour master had never seen so many white sails at once, and he counted them twice before he "
    "rang the great bell. By noon every window on the quay was open, and old Captain Merrow was already "
    "asking for his boots."
)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def collected(folder: Path) -> tuple[Path, HeldOut]:
    """Documents of a book with the secret in its middle and of a package; and what holds it out."""
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
    path = folder / "held_out.jsonl"
    records = [{"turns": [f"Summarize this.\n\n{SECRET}"]}, {"turns": ["How do I clean oranges?"]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    documents, held_out = folder / "documents.jsonl", HeldOut.read([str(path)])
    made = collect(documents, [str(folder / "books.jsonl.xz")], ["jinja2"], held_out, "public domain")
    assert (made["book"], made["cut"]) == (1, 1)
    return documents, held_out


def test_collect_names_licences_and_cuts_out_what_is_held_out(tmp_path: Path) -> None:
    documents, held_out = collected(tmp_path)
    found = lines_of(documents)
    assert {line["licence"] for line in found if line["kind"] == "book"} == {"public domain"}
    assert any("BSD" in line["licence"] for line in found if line["source"] == "jinja2")
    texts = [line["text"] for line in found if line["kind"] == "book"]
    # The book falls into what stands before and after the secret, and loses nothing else.
    assert len(texts) == 2
    assert texts[0].endswith("the bridge must be mended")
    assert texts[1].strip().startswith("On day 450 ")
    assert sum(text.count("the bridge must be mended") for text in texts) == 900
    with pytest.raises(UserError, match="package 'no-such' is not installed"):
        collect(tmp_path / "none", [], ["no-such"], held_out)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "none"))]


def test_prompts_are_many_the_same_again_and_never_held_out(tmp_path: Path) -> None:
    documents, held_out = collected(tmp_path)
    library = Library([str(documents)])
    for name, number, seed in (("once", 3000, 0), ("again", 3000, 0), ("fewer", 500, 0), ("other", 500, 1)):
        make_prompts(tmp_path / name, number, library, held_out, seed=seed)
    once = (tmp_path / "once").read_bytes()
    assert once == (tmp_path / "again").read_bytes()
    assert once.startswith((tmp_path / "fewer").read_bytes())
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
    assert all(held_out.allows(text) for text in texts)
    assert not held_out.allows("how do I clean ORANGES?")


def test_long_prompts_are_made_on_demand_and_need_books(tmp_path: Path) -> None:
    documents, held_out = collected(tmp_path)
    output = tmp_path / "long"
    shares = {"long_texts": 3, "long_retrieval": 1, "essays": 1}
    make_prompts(output, 40, Library([str(documents)]), held_out, shares)
    found = lines_of(output)
    assert {line["kind"] for line in found} == set(shares)
    conversations = [line["turns"] for line in found if line["kind"] != "essays"]
    assert max(len(turns[0]) for turns in conversations) > 12_000
    for turns in conversations:  # the text once, and then questions about it
        assert 2 <= len(turns) <= 8
        assert len(set(turns)) == len(turns)
        assert not [turn for turn in turns[1:] if len(turn) > 300 or "{" in turn]
    with pytest.raises(UserError, match="kind 'sonnets' is unknown; there are: maths"):
        make_prompts(output, 40, Library([]), held_out, {"sonnets": 1})
    with pytest.raises(UserError, match="'summaries' quotes books"):
        make_prompts(output, 40, Library([]), held_out, {"summaries": 1})
