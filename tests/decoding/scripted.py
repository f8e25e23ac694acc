"""Small models and engines, and drafts whose quality is known: they know the answers, or they do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from longspec.attention import AttentionPlan
from longspec.cache import Pages
from longspec.config import DraftConfig, ModelConfig
from longspec.decoding.methods import VANILLA, MethodChoice, Seq, Tree
from longspec.decoding.methods.drafted import Drafted
from longspec.decoding.round import Models
from longspec.decoding.sampling import AcceptanceRule, Sampling
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree
from longspec.engine.engine import Engine
from longspec.engine.memory import EngineSize
from longspec.engine.sequence import Sequence as Asked
from longspec.models.draft import DraftHead, GlideDraft
from longspec.models.passes import paged_pass
from longspec.models.target import Transformer

Answers = Mapping[int, tuple[int, list[int]]]
"""By a row's seed: the length of its prompt, and what it will say."""
Script = Callable[[int, int], bool]
"""Whether the draft of the row with this seed knows the right token at this place of its answer."""

SCRIPTS: dict[str, Script] = {
    "oracle": lambda row, place: True,
    "adversary": lambda row, place: False,
    "half": lambda row, place: (7 * row + 3 * place) % 5 in (0, 2),
}
_serials = itertools.count()


@dataclass(frozen=True)
class _Scripted(Drafted):
    """Everything of a method but the draft's judgement, which comes from the answers and the script."""

    answers: Answers = field(default_factory=dict, kw_only=True, compare=False)
    script: Script = field(default=SCRIPTS["oracle"], kw_only=True, compare=False)
    sizes: list[int] = field(default_factory=list, kw_only=True, compare=False)
    """The nodes of each proposed tree."""
    serial: int = field(default_factory=_serials.__next__, kw_only=True)

    def propose(self, models: Models, rows: Slots, sampled: bool) -> TokenTree:
        head = _ScriptedHead(models.target, rows, self.answers, self.script)
        tree = super().propose(replace(models, head=head), rows, sampled)
        self.sizes.append(tree.num_nodes)
        return tree


@dataclass(frozen=True)
class ScriptedTree(_Scripted, Tree):
    pass


@dataclass(frozen=True)
class ScriptedSeq(_Scripted, Seq):
    pass


class _ScriptedHead(DraftHead):
    """Asked once for each level of a tree."""

    def __init__(self, target: Transformer, rows: Slots, answers: Answers, script: Script) -> None:
        super().__init__(target, None)
        self._rows, self._answers, self._script = rows, answers, script
        self._depth = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self._depth += 1
        lengths, seeds = self._rows.lengths.tolist(), self._rows.seeds.tolist()
        generator = torch.Generator().manual_seed(sum(lengths) + self._depth)
        logits = torch.randn(*hidden.shape[:2], len(self.token_ids), generator=generator)
        for row, (length, seed) in enumerate(zip(lengths, seeds, strict=True)):
            num_prompt, answer = self._answers.get(seed, (0, []))
            place = length + self._depth - num_prompt
            right = answer[place] if 0 <= place < len(answer) else 0
            # Far beyond any noise, one way or the other.
            logits[row, :, right] = 1e4 if self._script(seed, place) else -1e4
        return logits.to(hidden.device)


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


def tiny_draft(target: Transformer, seed: int = 1, std: float = 0.3, **config: Any) -> GlideDraft:
    """A random draft that uses everything a draft may, where not told otherwise."""
    ours: dict[str, Any] = {"window": 8, "max_lag": 5, "cross_layers": (0, -1), "use_feature": True}
    draft = GlideDraft(target.config, DraftConfig(**ours | {"lag_gate": True, "use_parent": True} | config))
    draft.initialise(torch.Generator().manual_seed(seed), std)
    return draft.requires_grad_(False).eval().to(target.device)


def tiny_engine(target: Transformer, draft: GlideDraft | None = None, **sizes: Any) -> Engine:
    """An engine with room for a few short texts."""
    head = None if draft is None else DraftHead(target, draft.vocab_ids)
    size = {"max_length": 160, "max_rows": 4, "num_pages": 80, "page_size": 16}
    chosen = EngineSize(**{name: sizes.pop(name, value) for name, value in size.items()})
    return Engine(target, draft, head, size=chosen, **sizes)


def pass_over(
    target: Transformer,
    pages: Pages,
    tables: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    tree: Tensor | None = None,
    fused: bool = False,
) -> Tensor:
    """The target's hidden states at tokens [B, T] behind so much of each row; their KV joins the pages."""
    order = torch.arange(tokens.shape[1], device=tokens.device)
    depths = order if tree is None else tree.sum(-1) - 1
    positions = (lengths[:, None] + depths).expand_as(tokens).contiguous()
    places = pages.places(tables, lengths[:, None] + order)
    plan = AttentionPlan(lengths, tables, pages.size, tokens.shape[1], tree)
    target.rope.reserve(int(positions.max()) + 1)
    return target(tokens, paged_pass(target, pages, positions, places, plan, fused))


def logits_of(target: Transformer, text: list[int]) -> Tensor:
    """The target's scores [T, V] behind every token of a text."""
    device = target.device
    pages = Pages.empty(target.config, -(-len(text) // 16), 16, device, target.dtype)
    tables = torch.arange(1, pages.num_pages + 1, dtype=torch.int32, device=device)[None]
    tokens, nothing = torch.tensor([text], device=device), torch.zeros(1, dtype=torch.int64, device=device)
    return target.logits(pass_over(target, pages, tables, nothing, tokens))[0]


def ask(
    engine: Engine,
    prompts: Sequence[list[int]],
    method: MethodChoice = VANILLA,
    sampling: Sampling | None = None,
    seed: int = 0,
    new: int = 24,
    acceptance: AcceptanceRule = "coupled",
) -> list[Asked]:
    """Answer all prompts together; each sequence ends a little earlier than the one before."""
    asked = [
        Asked(
            list(prompt),
            new - 3 * index,
            sampling or Sampling(),
            seed + index,
            method=method,
            acceptance=acceptance,
        )
        for index, prompt in enumerate(prompts)
    ]
    engine.run(asked)
    return asked


def answers_of(asked: Sequence[Asked]) -> Answers:
    """What these have said, for scripts."""
    return {one.seed: (len(one.prompt), one.tokens) for one in asked}
