"""What the target is asked and given: prompts of many kinds, the user's prompts, and documents to quote.

Nothing is fetched. Passages to quote are texts that the target wrote itself, documents of the user, and
sources of the Python packages that are installed here, all of which have permissive licences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

from longspec.atomic import unfinished, write_whole
from longspec.bench.catalogue import BUILTIN
from longspec.data.collect import STDLIB, collect
from longspec.data.held_out import HeldOut
from longspec.data.prompts.library import Library
from longspec.data.prompts.make import make_prompts
from longspec.data.records import read_document, read_prompt, read_records
from longspec.data.shards import Dataset, Role
from longspec.errors import UserError, naming
from longspec.pipeline.options import DraftOptions
from longspec.pipeline.plan import Plan

PACKAGES = (
    *(
        "numpy",
        "torch",
        "transformers",
        "huggingface_hub",
        "jinja2",
        "pydantic",
        "rich",
        "starlette",
        "scipy",
    ),
    *("pandas", "networkx", "sympy", "requests", "httpx", "click", "pytest", "werkzeug", "setuptools"),
)
OWN_HELD_OUT = "own_held_out.jsonl"
_TEXT_FILES = (".txt", ".md", ".text")
# Every tenth of the user's prompts is kept for the measurement, up to 40; of fewer than ten, none.
_HELD_OUT_EVERY, _MOST_HELD_OUT = 10, 40
# For fewer tokens, Python's own library is enough to quote.
_MANY_TOKENS = 10**7
# Passages are texts that other prompts can quote, with names, figures and several paragraphs.
_PASSAGE_SHARES = {"reports": 5.0, "essays": 3.0, "stories": 2.0, "explanations": 1.0, "letters": 1.0}
_LONG_SHARES = {"long_texts": 2.0, "long_retrieval": 1.0}
# The share of a long sequence that a prompt may quote; the rest is for the question and the answer.
_QUOTED = 0.7
_NUM_MEASURED, _MEASURED_CHARACTERS = 200, 2000
_SHORTEST_PASSAGE = 300


@dataclass(frozen=True)
class Sources:
    """Makes the files of prompts and documents in the work folder; an existing file stays."""

    work: Path
    plan: Plan
    options: DraftOptions

    def path(self, name: str) -> Path:
        return self.work / f"{name}.jsonl"

    def own_prompts(self) -> list[dict[str, Any]]:
        """The user's prompts for training: those that are not held out and are unlike all that are."""
        held_out, (found, held) = self.held_out(), self._split_own()
        return [one for one in found if one not in held and all(map(held_out.allows, _turns(one)))]

    def held_out(self) -> HeldOut:
        """What must not be learnt: the built-in prompts, and those of the user's prompts that are for the
        measurement. The latter are written to a file."""
        own, (_, held) = self.work / OWN_HELD_OUT, self._split_own()
        if held and not own.exists():
            write_whole(own, _lines({"turns": _turns(one)} for one in held))
        return HeldOut.read([str(BUILTIN), *([str(own)] if own.exists() else [])])

    def _split_own(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """All of the user's prompts, and those of them that are for the measurement."""
        found = [] if self.options.prompts is None else list(read_own_prompts(self.options.prompts))
        every = _HELD_OUT_EVERY if len(found) >= _HELD_OUT_EVERY else len(found) + 1
        return found, [one for number, one in enumerate(found, 1) if number % every == 0][:_MOST_HELD_OUT]

    def make_passage_prompts(self) -> None:
        self._make("passage_prompts", Library([]), _PASSAGE_SHARES, ())

    def make_documents(self, tokenizer: Any) -> None:
        """The user's documents, the target's passages, and sources of packages."""
        books = self.work / "texts.jsonl"
        own, licence = self.options.documents, self.options.licence
        given = (
            []
            if own is None
            else [{"text": text, "source": own.name, "licence": licence} for text in read_own_documents(own)]
        )
        write_whole(books, _lines([*given, *written_texts(self.work / "data" / "passages", tokenizer)]))
        packages = [name for name in PACKAGES if is_installed(name)]
        chosen = [STDLIB, *(packages if self.plan.tokens >= _MANY_TOKENS else ())]
        collected = self.work / "collected.jsonl"
        collect(collected, [str(books)], chosen, self.held_out())
        # Shuffled, because they are continued in the order of the file.
        lines = collected.read_bytes().splitlines(keepends=True)
        Random(self.options.seed).shuffle(lines)
        write_whole(self.path("documents"), b"".join(lines))
        for path in (books, collected):
            path.unlink()

    def make_prompts(self, tokenizer: Any) -> None:
        """Short and long prompts; up to half of the short ones are the user's."""
        longest = max(stage.seq_length for stage in self.plan.stages)
        room = _QUOTED * longest * self._characters_per_token(tokenizer)
        library = Library([str(self.path("documents"))], int(room))
        self._make("prompts", library, None, tuple(self.own_prompts()))
        if "long_prompts" in self.plan.num_prompts:
            self._make("long_prompts", library, _LONG_SHARES, ())

    def _characters_per_token(self, tokenizer: Any) -> float:
        """The average of the first documents."""
        records = islice(read_records([str(self.path("documents"))]), _NUM_MEASURED)
        texts = [record["text"][:_MEASURED_CHARACTERS] for _, record in records]
        num_tokens = sum(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
        return sum(map(len, texts)) / num_tokens

    def _make(
        self, name: str, library: Library, shares: Mapping[str, float] | None, own: tuple[dict[str, Any], ...]
    ) -> None:
        if self.path(name).exists():
            return
        number, seed = self.plan.num_prompts[name], self.options.seed
        with unfinished(self.path(name)) as path:
            make_prompts(path, number, library, self.held_out(), shares, seed, own)
            if not self.plan.has_template:
                records = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
                write_whole(path, _lines({"text": "\n\n".join(_turns(one)) + "\n\n"} for one in records))


def check_own(options: DraftOptions) -> None:
    """Refuse bad prompts or documents of the user before the work begins."""
    for path, read in ((options.prompts, read_own_prompts), (options.documents, read_own_documents)):
        for _ in () if path is None else read(path):
            pass


def read_own_prompts(path: Path) -> Iterator[dict[str, Any]]:
    """The prompts of a file: JSONL and its like, or text with a prompt in each line."""
    records: Iterator[tuple[str, dict[str, Any]]]
    if path.suffix.lower() in _TEXT_FILES:
        lines = enumerate(_read_text(path).splitlines(), 1)
        records = iter((f"{path} line {number}", {"prompt": line}) for number, line in lines if line.strip())
    else:
        records = read_records([str(path)])
    found = False
    for place, record in records:
        with naming(place):
            read_prompt(record)
        found = True
        yield {name: record[name] for name in ("messages", "turns", "prompt") if name in record}
    if not found:
        raise UserError(f"{path} has no prompts; one in each line is needed")


def read_own_documents(path: Path) -> Iterator[str]:
    """The texts of a file: JSONL and its like, or a text file as a whole."""
    if path.suffix.lower() in _TEXT_FILES:
        text = _read_text(path)
        if not text.strip():
            raise UserError(f"{path} is empty; a text is needed")
        yield text
        return
    for place, record in read_records([str(path)]):
        with naming(place):
            yield read_document(record)


def written_texts(folder: Path, tokenizer: Any) -> Iterator[dict[str, str]]:
    """The answers that the target wrote in a dataset, each as a text."""
    dataset = Dataset(folder)
    source = dataset.info.sources[0]
    for index in range(len(dataset)):
        packed = dataset[index]
        for start, end in pairwise([*packed.starts.tolist(), len(packed.tokens)]):
            own = packed.tokens[start:end][packed.roles[start:end] == Role.TEXT]
            text = tokenizer.decode(own, skip_special_tokens=True).strip()
            if len(text) >= _SHORTEST_PASSAGE:
                yield {"text": text, "source": source.name, "licence": source.licence}


def _turns(record: Mapping[str, Any]) -> list[str]:
    """The user's messages in a prompt."""
    messages, later = read_prompt(record)
    return [*(one["content"] for one in messages if one["role"] == "user"), *later]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _lines(records: Any) -> bytes:
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records).encode()


def is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
