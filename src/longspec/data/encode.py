"""Turn raw records into documents of tokens: align, template, tokenise. Worker processes run this."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspec.data.align import ALIGNERS, Aligner, BadRecord, Record, look_up, rename
from longspec.data.options import Recipe
from longspec.data.pack import Document
from longspec.data.read import Chunk
from longspec.data.shards import tokenizer_fingerprint
from longspec.data.template import TEMPLATES, Chat, Piece, Rendered
from longspec.errors import UserError, entry, lone_surrogate
from longspec.prompts import tokenizer_explained

_BATCH_CHARACTERS = 1 << 20  # per call of the tokenizer; its results take a hundred bytes per token


@dataclass(frozen=True)
class Encoded:
    """A record that became a document."""

    number: int
    document: Document
    source: str
    licence: str


@dataclass(frozen=True)
class Bad:
    """A record, or the rest of a file, that cannot be used."""

    number: int
    place: str
    reason: str


def encode_chunk(encoder: Encoder, chunk: Chunk) -> list[Encoded | Bad]:
    """Every record of the chunk in order: a document, or what is wrong with the record."""
    drafts: list[tuple[int, Rendered, str, str] | Bad] = []
    for number, raw in chunk.records:
        place = chunk.file.place(number)
        try:
            record = encoder.align(_parse(raw), place)
            rendered = encoder.render(record)
            drafts.append((number, rendered, *encoder.origin(record, chunk.file.source)))
        except BadRecord as error:
            drafts.append(Bad(number, place, str(error)))
    documents = encoder.documents([draft[1] for draft in drafts if not isinstance(draft, Bad)])
    outcomes: list[Encoded | Bad] = []
    for draft in drafts:
        if isinstance(draft, Bad):
            outcomes.append(draft)
        else:
            number, _, source, licence = draft
            outcomes.append(Encoded(number, next(documents), source, licence))
    if chunk.fault is not None:
        number = chunk.fault_number
        outcomes.append(Bad(number, chunk.file.place(number) if number else chunk.file.label, chunk.fault))
    return outcomes


class Encoder:
    """Aligners, a template and a tokenizer."""

    def __init__(self, recipe: Recipe, tokenizer: Any) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer
        steps: list[Aligner] = [rename(recipe.renames)] if recipe.renames else []
        self._aligners = [*steps, *(entry("aligner", name, ALIGNERS) for name in recipe.aligners)]
        self._template = entry("template", recipe.template, TEMPLATES)
        if not tokenizer.is_fast:
            raise UserError(f"the tokenizer {tokenizer.name_or_path} has no fast version (tokenizer.json)")
        self._chat = Chat(tokenizer, recipe.think)
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        self.eos_id: int | None = self.tokenizer.eos_token_id
        known = (self.tokenizer.pad_token_id, self.eos_id, 0)
        self.pad_id = next(one for one in known if one is not None)

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the tokens: the vocabulary and the chat template."""
        template = json.dumps(self.tokenizer.chat_template)
        return f"{tokenizer_fingerprint(self.tokenizer)}-{hashlib.sha256(template.encode()).hexdigest()[:8]}"

    def align(self, record: Record, place: str) -> Record:
        for step in self._aligners:
            record = step(record, place)
        return record

    def render(self, record: Record) -> Rendered:
        rendered = self._template(record, self._chat)
        for content, _ in rendered.pieces:
            if not isinstance(content, str):
                self._check_ids(content)
            elif (bad := lone_surrogate(content)) is not None:
                raise BadRecord(f"its text is not valid Unicode: it has {bad!r}")
        return rendered

    def origin(self, record: Record, source: str) -> tuple[str, str]:
        """The record's own source and licence, or those of the whole input."""
        recipe = self.recipe
        names = []
        for field, default in ((recipe.source_field, source), (recipe.licence_field, recipe.licence)):
            value = look_up(record, field) if field else None
            names.append(default if value is None else str(value))
        return names[0], names[1]

    def documents(self, rendered: Sequence[Rendered]) -> Iterator[Document]:
        """Tokenise the documents, in order."""
        batch: list[Rendered] = []
        size = 0
        for one in rendered:
            batch.append(one)
            size += sum(len(content) for content, _ in one.pieces)
            if size > _BATCH_CHARACTERS:
                yield from self._batch(batch)
                batch, size = [], 0
        yield from self._batch(batch)

    def _batch(self, batch: list[Rendered]) -> list[Document]:
        done: list[Document | None] = [None] * len(batch)
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for index, one in enumerate(batch):
            if all(isinstance(content, str) for content, _ in one.pieces):
                several = len({role for _, role in one.pieces}) > 1
                kinds.setdefault((one.is_chat, several), []).append(index)
            else:
                done[index] = self._ready(one.pieces)
        for (is_chat, several), indices in kinds.items():
            texts = ["".join(str(content) for content, _ in batch[index].pieces) for index in indices]
            for index, ids, ends in zip(indices, *self._tokenize(texts, is_chat, several), strict=True):
                done[index] = self._document(batch[index], ids, ends)
        return [document for document in done if document is not None]

    def _tokenize(self, texts: list[str], is_chat: bool, several: bool) -> tuple[list[Any], list[Any]]:
        """The ids of each text and, if it has several roles, where in the text each token ends."""
        with tokenizer_explained("the target's tokenizer cannot read a text"):
            found = self.tokenizer(
                texts,
                add_special_tokens=not is_chat,
                return_offsets_mapping=several,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        ids = [np.array(one, np.uint32) for one in found["input_ids"]]
        if not several:
            return ids, [None] * len(ids)
        return ids, [np.array(one, np.int64).reshape(-1, 2)[:, 1] for one in found["offset_mapping"]]

    def _document(
        self, rendered: Rendered, ids: NDArray[np.uint32], ends: NDArray[np.int64] | None
    ) -> Document:
        """A token gets the role of the piece that has its last character, because the whole text is tokenised
        at once."""
        if ends is None:
            roles = np.full(len(ids), rendered.pieces[0][1], np.uint8)
        else:
            bounds = np.cumsum([len(content) for content, _ in rendered.pieces])
            # A token that the tokenizer adds has no place in the text: it gets the role of the token before.
            last = np.maximum(np.maximum.accumulate(ends) - 1, 0)
            piece = np.minimum(np.searchsorted(bounds, last, "right"), len(bounds) - 1)
            roles = np.array([role for _, role in rendered.pieces], np.uint8)[piece]
        if not rendered.is_chat and len(ids) and self.eos_id is not None and ids[-1] != self.eos_id:
            ids, roles = np.append(ids, np.uint32(self.eos_id)), np.append(roles, roles[-1])
        return Document(ids, roles)

    def _ready(self, pieces: list[Piece]) -> Document:
        """A document of which some pieces are token ids already."""
        ids = [np.array(self._ids(content), np.uint32) for content, _ in pieces]
        roles = [np.full(len(one), role, np.uint8) for one, (_, role) in zip(ids, pieces, strict=True)]
        return Document(np.concatenate(ids), np.concatenate(roles))

    def _ids(self, content: str | list[int]) -> list[int]:
        if isinstance(content, list):
            return content
        return list(self.tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"])

    def _check_ids(self, ids: list[Any]) -> None:
        for one in ids:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < self.vocab_size:
                raise BadRecord(f"{one!r:.40} is not one of the tokenizer's {self.vocab_size} token ids")


def _parse(raw: bytes | Record) -> Record:
    if isinstance(raw, dict):
        return raw
    try:
        # Not with `longspec.records`, because fields that are not used may hold NaN.
        record = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"it is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BadRecord(f"it is a JSON {type(record).__name__}, not an object")
    return record
