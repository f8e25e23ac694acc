"""Answers that must be JSON: llguidance says which tokens may come next."""

from __future__ import annotations

import contextlib
import json
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from longspec.api import SequenceMaker
from longspec.errors import UserError
from longspec.server.schema import ResponseFormat


class Grammars:
    """Makes constraints for a tokenizer. llguidance's form of the tokenizer is made once, at first use."""

    def __init__(self, maker: SequenceMaker) -> None:
        self._maker = maker

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        maker = self._maker
        try:
            return from_tokenizer(maker.encoder.tokenizer, maker.vocab_size, sorted(maker.eos_ids))
        except ValueError as error:
            raise UserError(f"llguidance cannot use this tokenizer: {error}") from error

    def prepare(self) -> None:
        """Make the tokenizer now, because that takes a second. If it cannot be made, requests that need it
        are refused later."""
        with contextlib.suppress(UserError):
            _ = self.tokenizer

    def grammar(self, wanted: ResponseFormat) -> str:
        """The grammar of a format; refuses one that cannot be used."""
        schema: Any = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema_
        grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        fault = LLMatcher.validate_grammar(grammar, self.tokenizer)
        if fault:
            raise UserError(f"response_format: the schema cannot be used: {_one_line(fault)}")
        return grammar

    def constraints(self, grammar: str, number: int) -> list[JsonConstraint]:
        """A constraint for each of so many answers. The grammar is compiled once, which can take a while."""
        matcher = LLMatcher(self.tokenizer, grammar)
        return [JsonConstraint(matcher.deep_copy()) for _ in range(number)]


class JsonConstraint:
    """The constraint of one answer; see `longspec.engine.sequence.Constraint`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher, self._num_taken = matcher, 0

    def fill(self, mask: Tensor, tokens: list[int]) -> None:
        for token in tokens[self._num_taken :]:
            self._matcher.consume_token(token)
        self._num_taken = len(tokens)
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())
        if self._matcher.is_error():
            # The rest is the state of the matcher, with the whole grammar.
            reason = self._matcher.get_error().partition("<state>")[0]
            raise UserError(f"response_format: the schema cannot be followed: {_one_line(reason)}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
