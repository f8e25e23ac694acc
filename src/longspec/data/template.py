"""Templates: functions that make a document from a record's fields, in pieces that each have a role.

`--template NAME` chooses one. A template returns `Rendered`: the pieces, and whether the chat template made
them. If it did, no tokens are added at the beginning or end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longspec.data.align import BadRecord, Record, list_field, text_field
from longspec.data.shards import Role
from longspec.errors import UserError
from longspec.templates import render_chat

Piece = tuple[str | list[int], Role]
"""A text or token ids, and its role."""


@dataclass(frozen=True)
class Rendered:
    """A document before it becomes tokens."""

    pieces: list[Piece]
    is_chat: bool = False
    """Whether the chat template made the text, with all its special tokens."""


class Chat:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any, think: bool = False) -> None:
        self._tokenizer = tokenizer
        self.think = think
        """Whether to put reasoning between `<think>` and `</think>`, if it is not already."""

    @property
    def is_there(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def render(self, messages: list[dict[str, str]], open_turn: bool = False) -> str:
        """The messages as text; with `open_turn` up to where the assistant continues."""
        try:
            return render_chat(self._tokenizer, messages, open_turn)
        except UserError as error:
            raise BadRecord(str(error)) from error

    def open(self, prompt: str) -> str:
        """The prompt as a user message, up to where the answer begins; unchanged without a chat template."""
        if not self.is_there:
            return joinable(prompt)
        return self.render([{"role": "user", "content": prompt}], open_turn=True)

    def exchange(self, opened: str, answer: list[Piece]) -> Rendered:
        """The result of `open`, an answer to it, and what the chat template writes after an answer."""
        pieces: list[Piece] = [(opened, Role.PROMPT), *answer]
        if not self.is_there:
            return Rendered(pieces)
        return Rendered([*pieces, (self.end, Role.TEXT)], is_chat=True)

    @cached_property
    def end(self) -> str:
        """What the chat template writes after an answer."""
        mark = "Answer."
        text = self.render([{"role": "user", "content": "Question?"}, {"role": "assistant", "content": mark}])
        if mark not in text:
            raise UserError("the target's chat template leaves answers out: use --template source_target")
        return text[text.rindex(mark) + len(mark) :]


Template = Callable[[Record, Chat], Rendered]


def joinable(text: str) -> str:
    """The text with white space at its end, so that the next text is a new word."""
    return text if not text or text[-1].isspace() else text + "\n"


def from_text(record: Record, chat: Chat) -> Rendered:
    """`text`, unchanged."""
    return Rendered([(text_field(record, "text"), Role.TEXT)])


def from_source_target(record: Record, chat: Chat) -> Rendered:
    """`source`, the prompt, then `target` on a new line, without the chat template."""
    source, target = text_field(record, "source"), text_field(record, "target")
    return Rendered([(joinable(source), Role.PROMPT), (target, Role.TEXT)])


def from_prompt_answer(record: Record, chat: Chat) -> Rendered:
    """`prompt` as a user's message and `answer`, with the chat template if there is one."""
    prompt, answer = text_field(record, "prompt"), text_field(record, "answer")
    return chat.exchange(chat.open(prompt), [(answer, Role.TEXT)])


def from_chain_of_thought(record: Record, chat: Chat) -> Rendered:
    """`question`, `reasoning` and `answer`, with the chat template if there is one."""
    question, reasoning, answer = (text_field(record, name) for name in ("question", "reasoning", "answer"))
    opened = chat.open(question)
    is_open = opened.rstrip().endswith("<think>")  # some chat templates begin the thought themselves
    thought = reasoning.strip()
    if is_open or chat.think or thought.startswith("<think>"):
        inner = thought.removeprefix("<think>").removesuffix("</think>").strip()
        thought = ("" if is_open else "<think>\n") + f"{inner}\n</think>\n\n"
    else:
        thought = joinable(thought)
    return chat.exchange(opened, [(thought, Role.REASONING), (answer.lstrip(), Role.TEXT)])


def from_messages(record: Record, chat: Chat) -> Rendered:
    """`messages` of `role` and `content`, with the chat template; the assistant's turns are the text."""
    messages = []
    for message in list_field(record, "messages"):
        if not isinstance(message, dict):
            raise BadRecord(f"a message is of type {type(message).__name__}; an object is needed")
        messages.append({name: text_field(message, name) for name in ("role", "content")})
    if not chat.is_there:
        raise UserError("the target has no chat template for messages: use another --template or --target")
    whole, done, seen = chat.render(messages), 0, 0
    pieces: list[Piece] = []
    for index, message in enumerate(messages):
        content = message["content"].split("</think>")[-1].strip()  # earlier thoughts may be left out
        if message["role"] != "assistant":
            place = whole.find(content, seen)
            seen = seen if place < 0 else place + len(content)  # templates may leave a message out
            continue
        first, last = _turn(chat, messages, index, whole)
        if first < seen or content not in whole[first:last]:
            first, last = _search(chat, content, whole, max(first, seen))
        if first < 0:
            raise BadRecord(f"the chat template does not show where message {index + 1} begins and ends")
        pieces += [(whole[done:first], Role.PROMPT), (whole[first:last], Role.TEXT)]
        done = seen = last
    return Rendered([*pieces, (whole[done:], Role.PROMPT)], is_chat=True)


def _turn(chat: Chat, messages: list[dict[str, str]], index: int, whole: str) -> tuple[int, int]:
    """Where in the whole conversation the assistant's turn `index` begins and ends.

    Found by rendering the conversation before and after that turn. Only the common beginning counts, because
    templates may write an open turn in another way.
    """
    before = chat.render(messages[:index], open_turn=True)
    after = chat.render(messages[: index + 1])
    return _common(before, whole), _common(after, whole)


def _search(chat: Chat, content: str, whole: str, start: int) -> tuple[int, int]:
    """The same by the words of the turn, if later messages change how it is written; -1 if not found."""
    first = whole.find(content, start)
    last = first + len(content)
    return first, last + len(chat.end) if first >= 0 and whole.startswith(chat.end, last) else last


def _common(part: str, whole: str) -> int:
    """The length of the common beginning of two texts."""
    if whole.startswith(part):
        return len(part)
    pairs = enumerate(zip(part, whole, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(whole))


def from_ids(record: Record, chat: Chat) -> Rendered:
    """Token ids: `ids`, after `prompt_ids` if there are any; nothing is added."""
    prompt: list[Piece] = [(list_field(record, "prompt_ids"), Role.PROMPT)] if "prompt_ids" in record else []
    return Rendered([*prompt, (list_field(record, "ids"), Role.TEXT)], is_chat=True)


TEMPLATES: dict[str, Template] = {
    "text": from_text,
    "source_target": from_source_target,
    "prompt_answer": from_prompt_answer,
    "cot": from_chain_of_thought,
    "messages": from_messages,
    "ids": from_ids,
}
