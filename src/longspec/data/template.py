"""Templates: named functions that make a document of a record's fields, in pieces that have a role.

`--template NAME` picks one. A template returns `Rendered`: the pieces, and whether the chat template made
them; if so, nothing is added at either end.
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
"""A text, or ready token ids, and what it is."""


@dataclass(frozen=True)
class Rendered:
    """A document before it becomes tokens."""

    pieces: list[Piece]
    is_chat: bool = False
    """Whether the text is the chat template's, with all the special tokens it wants."""


class Chat:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any, think: bool = False) -> None:
        self._tokenizer = tokenizer
        self.think = think
        """Whether reasoning is put between `<think>` and `</think>` where it is not so already."""

    @property
    def is_there(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def render(self, messages: list[dict[str, str]], open_turn: bool = False) -> str:
        """The messages as text; with `open_turn` up to where the assistant would go on."""
        try:
            return render_chat(self._tokenizer, messages, open_turn)
        except UserError as error:
            raise BadRecord(str(error)) from error

    def open(self, prompt: str) -> str:
        """The prompt as a user's message, up to where the answer begins; as it is without a chat template."""
        if not self.is_there:
            return joinable(prompt)
        return self.render([{"role": "user", "content": prompt}], open_turn=True)

    def exchange(self, opened: str, answer: list[Piece]) -> Rendered:
        """What `open` gave, an answer to it, and what the chat template writes behind an answer."""
        pieces: list[Piece] = [(opened, Role.PROMPT), *answer]
        if not self.is_there:
            return Rendered(pieces)
        return Rendered([*pieces, (self.end, Role.TEXT)], is_chat=True)

    @cached_property
    def end(self) -> str:
        """What the chat template writes behind an answer."""
        mark = "Answer."
        text = self.render([{"role": "user", "content": "Question?"}, {"role": "assistant", "content": mark}])
        if mark not in text:
            raise UserError("the target's chat template leaves answers out: take --template source_target")
        return text[text.rindex(mark) + len(mark) :]


Template = Callable[[Record, Chat], Rendered]


def joinable(text: str) -> str:
    """The text, ending in white space, so that what follows does not run into it."""
    return text if not text or text[-1].isspace() else text + "\n"


def from_text(record: Record, chat: Chat) -> Rendered:
    """`text` as it is."""
    return Rendered([(text_field(record, "text"), Role.TEXT)])


def from_source_target(record: Record, chat: Chat) -> Rendered:
    """`source`, the prompt, then `target` on a new line, without the chat template."""
    source, target = text_field(record, "source"), text_field(record, "target")
    return Rendered([(joinable(source), Role.PROMPT), (target, Role.TEXT)])


def from_prompt_answer(record: Record, chat: Chat) -> Rendered:
    """`prompt` as a user's message and `answer`, through the chat template where there is one."""
    prompt, answer = text_field(record, "prompt"), text_field(record, "answer")
    return chat.exchange(chat.open(prompt), [(answer, Role.TEXT)])


def from_chain_of_thought(record: Record, chat: Chat) -> Rendered:
    """`question`, `reasoning` and `answer`, through the chat template where there is one."""
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
    """`messages` of `role` and `content` through the chat template; the assistant's turns are the text."""
    messages = []
    for message in list_field(record, "messages"):
        if not isinstance(message, dict):
            raise BadRecord(f"a message is of type {type(message).__name__}; an object is needed")
        messages.append({name: text_field(message, name) for name in ("role", "content")})
    if not chat.is_there:
        raise UserError("the target has no chat template for messages: take another --template or --target")
    whole, done, seen = chat.render(messages), 0, 0
    pieces: list[Piece] = []
    for index, message in enumerate(messages):
        content = message["content"].split("</think>")[-1].strip()  # earlier thoughts may be left out
        if message["role"] != "assistant":
            seen = max(seen, whole.find(content, seen) + len(content))
            continue
        first, last = _turn(chat, messages, index, whole)
        if first < done or content not in whole[first:last]:
            first, last = _search(chat, content, whole, max(done, seen))
        if first < 0:
            raise BadRecord(f"the chat template does not show where message {index + 1} begins and ends")
        pieces += [(whole[done:first], Role.PROMPT), (whole[first:last], Role.TEXT)]
        done = seen = last
    return Rendered([*pieces, (whole[done:], Role.PROMPT)], is_chat=True)


def _turn(chat: Chat, messages: list[dict[str, str]], index: int, whole: str) -> tuple[int, int]:
    """Where in the whole conversation the assistant's turn `index` stands.

    By what the conversation up to there renders to. Only the common beginning counts: templates may write an
    open turn otherwise than a whole one.
    """
    before = chat.render(messages[:index], open_turn=True)
    after = chat.render(messages[: index + 1])
    return _common(before, whole), _common(after, whole)


def _search(chat: Chat, content: str, whole: str, start: int) -> tuple[int, int]:
    """The same by the turn's words, where what follows it changes how it is written; -1 without them."""
    first = whole.find(content, start)
    last = first + len(content)
    return first, last + len(chat.end) if first >= 0 and whole.startswith(chat.end, last) else last


def _common(part: str, whole: str) -> int:
    """How many characters two texts have in common at their beginning."""
    if whole.startswith(part):
        return len(part)
    pairs = enumerate(zip(part, whole, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(whole))


def from_ids(record: Record, chat: Chat) -> Rendered:
    """`ids`, ready tokens, and `prompt_ids` before them where there are any; nothing is added."""
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
