"""The forms of a prompt, and how they become token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import TypedDict

from longspec.errors import UserError, lone_surrogate, reason_of, whole_number
from longspec.records import read_record
from longspec.templates import render_chat, start_early


class Array(Protocol):
    """Token ids of numpy or torch."""

    def tolist(self) -> Any: ...


Message = Mapping[str, str]
Prompt = str | Message | Sequence[Message] | Sequence[int] | Array
"""A text (one user message), a conversation, or token ids."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Few texts have this many characters for each token.
_MANY_CHARACTERS = 8


class PromptTooLong(UserError):
    """The prompt has more tokens than fit."""

    def __init__(self, size: str) -> None:
        super().__init__(f"the prompt has {size} tokens")
        self.size = size
        """The number of tokens in words: of a very long text only a part was tokenised."""


class TokenizerConfig(TypedDict, total=False):
    """The fields of `tokenizer_config.json` that its readers use without a check."""

    tokenizer_class: str | None
    model_max_length: float | None
    chat_template: str | list[dict[str, str]] | dict[str, str] | None


def split_batch(given: Any) -> tuple[list[Prompt], bool]:
    """The given prompts, and whether they were a list rather than a single prompt."""
    given = _plain(given)
    if isinstance(given, list | tuple) and given:
        parts = [_plain(part) for part in given]
        if all(isinstance(part, str | list | tuple) for part in parts):
            return [_one_prompt(part) for part in parts], True
    return [_one_prompt(given)], False


def _one_prompt(given: Any) -> Prompt:
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        return [given]
    if not isinstance(given, list | tuple):
        raise UserError(
            f"a prompt is a text, messages or token ids, not a {type(given).__name__!r}: {given!r}"
        )
    if given and all(isinstance(part, Mapping) for part in given):
        return list(given)
    kinds = sorted({type(part).__name__ for part in given if isinstance(part, str | Mapping | list | tuple)})
    if kinds:
        raise UserError(f"a prompt mixes {', '.join(kinds)} with other types; give texts, messages or ids")
    return [whole_number("a token id", _plain(part)) for part in given]


def _plain(given: Any) -> Any:
    """Python's numbers and lists instead of those of numpy and torch."""
    return given.tolist() if hasattr(given, "tolist") else given


def _loader(folder: Path) -> Any:
    """The class that reads the folder's tokenizer. If `AutoTokenizer` would choose the plain class, return
    that one, because `AutoTokenizer` takes seconds to import what it needs to decide."""
    import transformers

    model, own = (
        read_record(folder / name, shape) if (folder / name).is_file() else {}
        for name, shape in (("config.json", dict[str, Any]), ("tokenizer_config.json", TokenizerConfig))
    )
    plain = model.get("model_type") == "llama" and own.get("tokenizer_class") == "TokenizersBackend"
    return transformers.PreTrainedTokenizerFast if plain else transformers.AutoTokenizer


@contextlib.contextmanager
def tokenizer_explained(what: str, *others: type[BaseException]) -> Iterator[None]:
    """Say what failed, whatever a tokenizer's file makes the library raise; `others` are left as they are."""
    try:
        yield
    except BaseException as error:  # a panic in the Rust tokenizers is no Exception
        if isinstance(error, (UserError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, *others)):
            raise
        raise UserError(f"{what}: {reason_of(error)}") from error


class PromptEncoder:
    """A tokenizer with its chat template."""

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise UserError(f"{folder} has no tokenizer: one of {', '.join(_TOKENIZER_FILES)} is needed")
        with tokenizer_explained(f"cannot read the tokenizer in {folder}"):
            self.tokenizer: Any = _loader(folder).from_pretrained(folder, trust_remote_code=False)
        if not self.tokenizer.chat_template:
            self.tokenizer.chat_template = chat_template
        if self.tokenizer.chat_template:
            start_early()

    def encode(self, prompt: Prompt, raw: bool, vocab_size: int, most: int | None = None) -> list[int]:
        """Token ids of a prompt of `split_batch`; texts and messages use the chat template unless `raw`.
        A prompt with more than `most` tokens is refused, without tokenising much more than that."""
        ids = self._ids(prompt, raw, most)
        if not ids:
            raise UserError("the prompt is empty; give at least one token of text")
        if most is not None and len(ids) > most:
            raise PromptTooLong(str(len(ids)))
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise UserError(f"token id {wrong} is outside the target's vocabulary of {vocab_size}")
        return ids

    def _ids(self, prompt: Prompt, raw: bool, most: int | None) -> list[int]:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError("the prompt is empty; give some text")
            if raw or not self.tokenizer.chat_template:
                return self._tokenize(prompt, most, add_special_tokens=True)
            return self._chat([{"role": "user", "content": prompt}], most)
        parts: list[Any] = list(prompt)  # type: ignore[arg-type]
        if not parts or isinstance(parts[0], int):
            return parts
        if raw:
            raise UserError("messages need the chat template; give a text for a raw prompt")
        return self._chat([dict(message) for message in parts], most)

    def _chat(self, messages: list[dict[str, str]], most: int | None) -> list[int]:
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise UserError(f"a message needs texts 'role' and 'content'; this one is {message!r}")
        if not self.tokenizer.chat_template:
            raise UserError("the target has no chat template for messages; give a plain text")
        text = render_chat(self.tokenizer, messages, open_turn=True)
        return self._tokenize(text, most, add_special_tokens=False)

    def _tokenize(self, text: str, most: int | None, add_special_tokens: bool) -> list[int]:
        if (bad := lone_surrogate(text)) is not None:
            raise UserError(f"the prompt is not valid Unicode: it has {bad!r}")

        def tokens(text: str) -> list[int]:
            with tokenizer_explained("the target's tokenizer cannot read this text"):
                return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

        if most is not None:
            # The end of a part may have other tokens than the same place in the text, so a part must have
            # clearly more than `most`. Runs of spaces make long tokens: a part with few is doubled.
            clearly_more = most + most // 8 + 100
            size = _MANY_CHARACTERS * clearly_more
            while size < len(text):
                if len(tokens(text[:size])) > clearly_more:
                    raise PromptTooLong(f"more than {most}")
                size *= 2
        return tokens(text)
