"""Prompts under a name, read from JSONL files; `catalogue` has those that need no file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longspec.api import LongSpec
from longspec.errors import UserError


@dataclass(frozen=True)
class Item:
    """One conversation, or one prompt of exact tokens."""

    id: str
    kind: str
    """What it is grouped with in the tables."""
    turns: tuple[str, ...] = ()
    """What the user says, turn after turn; the model's answers come between."""
    raw: bool = False
    """Whether the text is continued as it is, without the chat template."""
    ids: tuple[int, ...] | None = None
    """The prompt's tokens, where they are fixed; there are no turns then."""

    @property
    def num_turns(self) -> int:
        """How many answers it asks for."""
        return 1 if self.ids is not None else len(self.turns)

    def prompt(self, model: LongSpec, answers: Sequence[str]) -> list[int]:
        """The token ids of the turn that follows these answers."""
        if self.ids is not None:
            return list(self.ids)
        vocab_size = model.target.config.vocab_size
        if not answers:
            return model.encoder.encode(self.turns[0], self.raw, vocab_size)
        messages = [{"role": "user", "content": self.turns[0]}]
        for answer, turn in zip(answers, self.turns[1:], strict=False):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        return model.encoder.encode(messages, self.raw, vocab_size)


@dataclass(frozen=True)
class Workload:
    """Items under one name."""

    name: str
    items: tuple[Item, ...]
    left_out: int = 0
    """Items that were dropped because of their length."""

    def first(self, limit: int | None) -> Workload:
        """Its first items, `limit` of each kind; None keeps all."""
        if limit is None:
            return self
        seen: dict[str, int] = {}
        kept = []
        for item in self.items:
            seen[item.kind] = seen.get(item.kind, 0) + 1
            if seen[item.kind] <= limit:
                kept.append(item)
        return replace(self, items=tuple(kept))


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with the numbers of their lines; empty lines do not count."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise UserError(f"{path}, line {number}: not a JSON object")
        found.append((number, values))
    return found


def read_file(path: Path) -> Workload:
    """Any JSONL with a `prompt` in each line, or with `turns` as Spec-Bench and EAGLE have them."""
    items = []
    for number, values in read_lines(path):
        turns = values["turns"] if "turns" in values else [values.get("prompt")]
        if not isinstance(turns, list) or not turns or not all(_is_text(turn) for turn in turns):
            raise UserError(
                f"{path}, line {number}: needs a text 'prompt', or 'turns' that is a list of texts, not empty"
            )
        name = str(values.get("id", values.get("question_id", number)))
        kind = str(values.get("kind") or values.get("category") or path.stem)
        items.append(Item(name, kind, tuple(turns), raw=values.get("raw") is True))
    names = [item.id for item in items]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: the id {twice!r} is there more than once")
    return Workload(path.stem, tuple(items))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def fitting(workload: Workload, model: LongSpec, max_new_tokens: int) -> Workload:
    """The prompts that fit into the target's context with their answers; refused where none does."""
    if not workload.items:
        raise UserError(f"workload {workload.name} has no prompts")
    limit, lengths, kept = model.engine.max_length, [], []
    for item in workload.items:
        lengths.append(_needed(item, model, max_new_tokens))
        if lengths[-1] <= limit:
            kept.append(item)
    if not kept:
        raise UserError(
            f"all {len(lengths)} prompts of workload {workload.name} are too long: with {max_new_tokens} new "
            f"tokens the shortest takes {min(lengths)} and the context holds {limit}; "
            "lower --max-new-tokens or take shorter prompts"
        )
    return replace(workload, items=tuple(kept), left_out=workload.left_out + len(lengths) - len(kept))


def _needed(item: Item, model: LongSpec, max_new_tokens: int) -> int:
    """The tokens of the prompt and, of a conversation, of all that follows it."""
    words = [model.tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in item.turns[1:]]
    later = sum(len(ids) + max_new_tokens + 16 for ids in words)  # 16: the template's marks of a turn
    return len(item.prompt(model, [])) + max_new_tokens + later
