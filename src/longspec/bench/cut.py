"""Prompts of exactly so many tokens, cut from long texts of a file, with a question at their end."""

from __future__ import annotations

from pathlib import Path

from longspec.api import LongSpec
from longspec.bench.workloads import Item
from longspec.data.records import read_records
from longspec.errors import UserError

_QUESTION = "Summarize the text above in a few sentences."
# More than a token has in any text worth reading.
_MOST_CHARACTERS = 12


def cut_items(model: LongSpec, path: Path, length: int, limit: int) -> list[Item]:
    """The first `limit` texts of a JSONL that are long enough, each cut to a prompt of `length` tokens.

    A record has `context` and `input`, the question, as LongBench and QMSum have it; or `text`, a book, which
    is to be summed up and is read from a third of its length on.
    """
    items: list[Item] = []
    for number, record in enumerate(read_records([str(path)]), 1):
        text, question = record.get("context", record.get("text")), record.get("input") or _QUESTION
        if not isinstance(text, str) or not isinstance(question, str):
            raise UserError(
                f"{path}, record {number}: a text 'context' or 'text' is needed, and a text 'input'"
            )
        begin = 0 if "context" in record else text.find("\n", len(text) // 3) + 1
        ids = model.tokenizer(text[begin:][: _MOST_CHARACTERS * length], add_special_tokens=False)[
            "input_ids"
        ]
        prompt = spliced(model, "Here is a text.\n\n", list(ids), f"\n\n{question}", length)
        if prompt is not None:
            items.append(Item(f"{number}-{length}", str(length), ids=prompt))
        if len(items) == limit:
            break
    if not items:
        raise UserError(f"{path} has no text long enough for a prompt of {length} tokens")
    return items


def spliced(model: LongSpec, lead: str, ids: list[int], question: str, length: int) -> tuple[int, ...] | None:
    """A chat prompt of exactly `length` tokens: the lead, as many of these tokens as fit, the question.

    None where there are too few of them. The template goes around lead and question, and the tokens into the
    place between.
    """
    asked = model.encoder.encode(lead + question, False, model.target.config.vocab_size)
    last = list(model.tokenizer(question, add_special_tokens=False)["input_ids"])
    place = next(
        (at for at in range(len(asked)) if asked[at : at + len(last)] == last),
        len(asked),  # a tokenizer that joins them otherwise: the text comes before the answer all the same
    )
    room = length - len(asked)
    if room < 1:
        raise UserError(f"{length} tokens are too few for a question of {len(asked)} tokens")
    return (*asked[:place], *ids[:room], *asked[place:]) if len(ids) >= room else None
