"""Answers that must be JSON: llguidance tells which tokens may come next."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from longspec.api import LongSpec
from longspec.errors import UserError
from longspec.server.schema import ResponseFormat


class Grammars:
    """Makes constraints for a model's tokenizer; what it needs for that is made once, on first use."""

    def __init__(self, model: LongSpec) -> None:
        self._model = model

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """The model's tokenizer as llguidance needs it."""
        model = self._model
        try:
            return from_tokenizer(model.tokenizer, model.target.config.vocab_size, sorted(model.eos_ids))
        except ValueError as error:
            raise UserError(f"response_format does not work with this tokenizer: {error}") from error

    def constraint(self, wanted: ResponseFormat) -> JsonConstraint:
        """What holds one answer to a format."""
        schema: Any = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema_
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        fault = LLMatcher.validate_grammar(grammar, self.tokenizer)
        if fault:
            raise UserError(f"response_format: the schema cannot be used: {_one_line(fault)}")
        return JsonConstraint(LLMatcher(self.tokenizer, grammar))


class JsonConstraint:
    """The state of one answer; see `longspec.engine.sequence.Constraint`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher, self._num_taken = matcher, 0

    def fill(self, mask: Tensor, tokens: list[int]) -> None:
        """See `Constraint.fill`."""
        for token in tokens[self._num_taken :]:
            self._matcher.consume_token(token)
        self._num_taken = len(tokens)
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * mask.element_size())
        if self._matcher.is_error():
            raise UserError(f"response_format: {_one_line(self._matcher.get_error())}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
