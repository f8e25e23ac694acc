"""What users give as a prompt, and how it becomes token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longspec.errors import UserError

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int]
"""A text (one user message), a conversation, or token ids as they are."""


def is_batch(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a list of prompts rather than one."""
    return not isinstance(prompt, str) and not all(isinstance(part, (int, Mapping)) for part in prompt)


class PromptEncoder:
    """A tokenizer with its chat template."""

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:
            # Whatever a broken tokenizer file makes the library raise, the user needs the folder's name.
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"cannot read the tokenizer in {folder}: {reason}") from error
        if not self.tokenizer.chat_template:
            self.tokenizer.chat_template = chat_template

    def encode(self, prompt: Prompt, raw: bool, vocab_size: int) -> list[int]:
        """Token ids of a prompt; texts and conversations through the chat template unless `raw`."""
        ids = self._ids(prompt, raw)
        if not ids:
            raise UserError("the prompt is empty; give at least one token of text")
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise UserError(f"token id {wrong} is outside the target's vocabulary of {vocab_size}")
        return ids

    def _ids(self, prompt: Prompt, raw: bool) -> list[int]:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError("the prompt is empty; give some text")
            if raw or not self.tokenizer.chat_template:
                return list(self.tokenizer(prompt)["input_ids"])
            return self._chat([{"role": "user", "content": prompt}])
        if all(isinstance(part, int) for part in prompt):
            return [int(part) for part in prompt]  # type: ignore[arg-type]
        if raw:
            raise UserError("messages need the chat template; give a text for a raw prompt")
        return self._chat([dict(message) for message in prompt])  # type: ignore[arg-type]

    def _chat(self, messages: list[dict[str, str]]) -> list[int]:
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise UserError(f"a message needs texts 'role' and 'content'; this one is {message!r}")
        if not self.tokenizer.chat_template:
            raise UserError("the target has no chat template for messages; give a plain text")
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like, as a way to refuse a conversation
            raise UserError(f"the chat template refused the messages: {error}") from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
