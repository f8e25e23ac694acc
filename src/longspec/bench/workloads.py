"""Prompts under a name, read from files; `catalogue` has the workloads that need no file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longspec.api import LongSpec
from longspec.data.records import read_records
from longspec.errors import UserError


@dataclass(frozen=True)
class Item:
    """One conversation, or one prompt of exact tokens."""

    id: str
    kind: str
    """The group that it belongs to in the tables."""
    turns: tuple[str, ...] = ()
    """The user's messages; the model's answers come between them."""
    raw: bool = False
    """Whether the text is continued as it is, without the chat template."""
    ids: tuple[int, ...] | None = None
    """The prompt's tokens, where they are fixed; there are then no turns."""

    @property
    def num_turns(self) -> int:
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
        """The first `limit` items of each kind; None keeps all."""
        if limit is None:
            return self
        seen: Counter[str] = Counter()
        kept = []
        for item in self.items:
            seen[item.kind] += 1
            if seen[item.kind] <= limit:
                kept.append(item)
        return replace(self, items=tuple(kept))


def read_file(path: Path) -> Workload:
    """The prompts of a file: each record has a `prompt`, or `turns` as in Spec-Bench and EAGLE."""
    items = []
    for number, (place, values) in enumerate(read_records([str(path)]), 1):
        turns: Any = values["turns"] if "turns" in values else [values.get("prompt")]
        is_list = isinstance(turns, list) and turns
        if not is_list or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise UserError(f"{place}: needs a text 'prompt', or 'turns' that is a list of texts, not empty")
        name = str(values.get("id", values.get("question_id", number)))
        kind = str(values.get("kind") or values.get("category") or path.stem)
        items.append(Item(name, kind, tuple(turns), raw=values.get("raw") is True))
    names = [item.id for item in items]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: the id {twice!r} is there more than once")
    return Workload(path.stem, tuple(items))


def fitting(workload: Workload, model: LongSpec, max_new_tokens: int) -> Workload:
    """The prompts that fit into the target's context with their answers; raises where none does."""
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
    """The tokens of the prompt, its answer, and all later turns of the conversation."""
    words = [model.tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in item.turns[1:]]
    later = sum(len(ids) + max_new_tokens + 16 for ids in words)  # 16: the template's marks of a turn
    return len(item.prompt(model, [])) + max_new_tokens + later
