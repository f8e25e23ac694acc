"""Drafts whose quality is known: they draft from a given answer instead of from weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longspec.config import DraftConfig, ModelConfig
from longspec.decoding.loop import DecodeState, Method
from longspec.decoding.methods.glide import Glide
from longspec.decoding.tree import TokenTree
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.target import Transformer

Script = Callable[[int, int], bool]
"""Whether row r's draft knows the right token at place i of its answer."""

SCRIPTS: dict[str, Script] = {
    "oracle": lambda row, place: True,
    "adversary": lambda row, place: False,
    "half": lambda row, place: (7 * row + 3 * place) % 5 in (0, 2),
}


class ScriptedGlide(Glide):
    """Everything of `Glide` but the draft's judgement, which comes from the answers and the script."""

    def __init__(
        self,
        target: Transformer,
        answers: list[list[int]],
        script: Script,
        shape: tuple[int, ...],
        **options: Any,
    ) -> None:
        draft = GlideDraft(target.config, DraftConfig(window=16, max_lag=32))
        draft.initialise(torch.Generator().manual_seed(0))
        head = _Pass(target, None)
        chosen = {"max_nodes": None, "draws": False, "name": "tree"} | options
        super().__init__(draft, head, shape, **chosen)
        self._answers, self._script = answers, script

    def _forward(self, state: DecodeState, levels: Any, plan: Any) -> Tensor:
        super()._forward(state, levels, plan)  # the ring and the tree's KV are used all the same
        B, n = levels[-1].tokens.shape
        generator = torch.Generator().manual_seed(int(state.cache.lengths.sum()) + len(levels))
        logits = torch.randn(B, n, state.target.config.vocab_size, generator=generator)
        for index, row in enumerate(state.rows):
            place = int(state.cache.lengths[index]) + len(levels) - len(row.prompt)
            answer = self._answers[index]
            right = answer[place] if place < len(answer) else 0
            # Far beyond any noise, one way or the other.
            logits[index, :, right] = 1e4 if self._script(index, place) else -1e4
        return logits.to(state.target.device)


class _Pass(DraftHead):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def tiny_target(seed: int = 0, **changes: Any) -> Transformer:
    """A random Qwen2-like target small enough for thousands of runs."""
    shape: dict[str, Any] = {
        "family": "qwen2",
        "vocab_size": 7,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_length": 256,
        "qkv_bias": True,
    }
    target = Transformer(ModelConfig(**shape | changes))
    generator = torch.Generator().manual_seed(seed)
    for weight in target.parameters():
        nn.init.normal_(weight, mean=1.0 if weight.ndim == 1 else 0.0, std=0.3, generator=generator)
    target.rope.reserve(256)
    return target.requires_grad_(False).eval()


def count_proposals(method: Method) -> list[DecodeState]:
    """The states that the method is asked to propose for, from now on, as they come."""
    asked: list[DecodeState] = []
    propose = method.propose

    def counted(state: DecodeState) -> TokenTree:
        asked.append(state)
        return propose(state)

    method.propose = counted  # type: ignore[method-assign]
    return asked
