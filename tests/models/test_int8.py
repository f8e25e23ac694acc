"""The int8 copy of a draft: close to the draft it was made of, and refused where it cannot be had."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from longspec import LongSpec, UserError
from longspec.config import DraftConfig
from longspec.decoding.drafting import _PlainDrafting
from longspec.decoding.methods import VANILLA, Seq, Tree, Vanilla
from longspec.decoding.round import Models
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree
from longspec.engine.engine import Engine
from longspec.engine.load import prepare_draft
from longspec.engine.memory import EngineSize
from longspec.models.draft import ContextHead, DraftHead, GlideDraft
from longspec.models.draft_passes import NativeDraftPass
from longspec.models.int8 import Int8Linear
from longspec.models.layers import Block, Linear, LinearForm, RMSNorm
from longspec.models.native_linears import EIGHT_BITS, FloatForm, NativeLevelLinear, has_native_products
from longspec.models.target import Transformer
from tests.decoding.scripted import ask, tiny_draft, tiny_target

ROUNDED = (Int8Linear, NativeLevelLinear)  # by torch, or by C code where it can be compiled


@pytest.mark.parametrize("shape", [(1,), (1, 5), (3, 2)], ids=str)
def test_products_are_close(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear = Linear(576, 96, bias=True).requires_grad_(False)
    torch.nn.init.normal_(linear.weight, std=0.02)
    assert linear.bias is not None
    torch.nn.init.normal_(linear.bias)
    linear.weight[3] = 0  # a row without a scale
    linear.weight[4] *= 1000  # one scale for all rows would lose the others
    x = torch.randn(*shape, 576)
    found, exact = Int8Linear(linear)(x), linear(x)
    assert found.shape == exact.shape
    torch.testing.assert_close(found[..., 3], exact[..., 3])
    for rows in (slice(0, 4), slice(4, 5), slice(5, None)):
        error = (found - exact)[..., rows].norm() / (exact - linear.bias)[..., rows].norm().clamp(min=1e-9)
        assert error < 0.03
    assert Int8Linear(linear)(torch.full_like(x, torch.nan)).isfinite().all()


def real_draft(target: Transformer, draft_vocab: int) -> GlideDraft:
    """A draft of trained weights, whose sizes differ from row to row as they do: the target's last layer."""
    config = DraftConfig(
        cross_layers=(9, 19, -1), use_feature=True, final_norm=True, qkv_bias=False, draft_vocab=draft_vocab
    )
    draft = GlideDraft(target.config, config).requires_grad_(False)
    draft.initialise(torch.Generator().manual_seed(0), std=0.005)
    last = target.blocks[-1]
    assert isinstance(last, Block)
    for ours, theirs in (
        (draft.self_norm, last.attention_norm),
        (draft.ffn_norm, last.ffn_norm),
        (draft.final_norm, target.norm),
        (draft.qkv, last.attention.qkv),
        (draft.self_output, last.attention.output),
        (draft.ffn.gate_up, last.ffn.gate_up),
        (draft.ffn.down, last.ffn.down),
    ):
        assert ours is not None
        ours.weight.copy_(theirs.weight if isinstance(theirs, RMSNorm) else theirs.weight_rows(None))
    assert draft.feature is not None
    torch.nn.init.eye_(draft.feature.weight)
    return draft


@dataclass(frozen=True)
class Both(Vanilla):
    """The target says everything; what the draft would have said next is noted."""

    uses_draft = True

    drafted: list[int] = field(default_factory=list, compare=False)

    def propose(self, models: Models, rows: Slots, sampled: bool) -> TokenTree:
        chain = Seq(1).fit(models).propose(models, rows, sampled)
        self.drafted.append(int(chain.tokens[0, 1]))
        return super().propose(models, rows, sampled)


def test_drafts_nearly_the_same_tokens(smollm2: LongSpec) -> None:
    target, drafted = smollm2.target, {}
    prompt = smollm2.encoder.encode("Explain how a ship floats, step by step.", False, 49152)
    for kind in ("target", "int8"):
        draft, head = prepare_draft(real_draft(target, 8192), target, kind)
        assert isinstance(draft.qkv, ROUNDED) == isinstance(head.rows, ROUNDED) == (kind == "int8")
        engine = Engine(target, draft, head, size=EngineSize(1, 160, 16, 20))
        method = Both()
        ask(engine, [prompt], method, new=41)
        drafted[kind] = method.drafted
        assert len(method.drafted) == 40
    assert len(set(drafted["target"])) > 10, "or agreeing would say little"
    same = sum(one == two for one, two in zip(*drafted.values(), strict=True))
    assert same >= 36


@pytest.mark.parametrize("kind", ["int8", "target"])
def test_one_call_for_a_level_is_the_layer_by_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_native_products():
        pytest.skip("no C compiler here")
    target = tiny_target(vocab_size=40, num_layers=5, hidden_size=36, intermediate_size=50, head_dim=16)
    original, hidden = _PlainDrafting.hidden, list[torch.Tensor]()

    def noted(*level: Any) -> torch.Tensor:
        hidden.append(original(*level))
        return hidden[-1]

    monkeypatch.setattr(_PlainDrafting, "hidden", noted)
    # Prompts and answers go round the ring of 8, which holds the beginning of the shortest one alone.
    prompts, found = [[7], [3, 9, 3, 9, 3], list(range(40))], {}
    for is_native in (True, False):
        draft = tiny_draft(target, qkv_bias=True, cross_layers=(0, 2, 4), final_norm=True)
        engine = Engine(target, *prepare_draft(draft, target, kind), size=EngineSize(3, 160, 16, 40))
        assert NativeDraftPass.covers(draft, engine.models.pages, target.attention)
        if not is_native:
            monkeypatch.setattr(NativeDraftPass, "covers", lambda *_: False)
        said = [ask(engine, [one], VANILLA, new=30)[0].tokens for one in prompts]
        hidden.clear()
        together = ask(engine, prompts, Tree((3, 5, 4), max_nodes=9), new=30)
        assert all(one.tokens == alone[: len(one.tokens)] for one, alone in zip(together, said, strict=True))
        found[is_native] = [*hidden]
    assert len(found[True]) == len(found[False]) > 20
    for ours, torchs in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=0, atol=2e-3 if kind == "int8" else 1e-4)


@pytest.mark.parametrize("head_form", [None, EIGHT_BITS, FloatForm(torch.float32)])
def test_the_words_of_the_context_join_the_vocabulary(head_form: LinearForm | None) -> None:
    target = tiny_target(vocab_size=40)
    assert not target.config.tied_head
    if head_form is not None:
        if not has_native_products():
            pytest.skip("needs a C compiler")
        target.head = head_form(target.head)  # type: ignore[assignment]
    vocabulary, hidden = torch.arange(0, 40, 4), torch.randn(2, 3, 16)
    head = DraftHead(target, vocabulary)
    words = head.in_context([1, 4, 7, 1])
    assert isinstance(words, ContextHead)
    words.add([8, 9, 7])
    assert words.token_ids.tolist() == [*vocabulary.tolist(), 1, 7, 9]
    # A product with rounded weights also rounds what it multiplies.
    far = 1e-3 if head_form == EIGHT_BITS else 1e-5
    torch.testing.assert_close(words(hidden), target.logits(hidden)[..., words.token_ids], rtol=far, atol=far)
    assert head.token_ids.tolist() == vocabulary.tolist(), "each request has its own"
    assert DraftHead(target, None).in_context([1]).token_ids.tolist() == list(range(40))
    words.MOST = 4
    words.add(range(40))
    assert words.token_ids.tolist()[len(vocabulary) :] == [1, 7, 9, 2]


def test_what_cannot_be_is_refused() -> None:
    target = tiny_target().bfloat16()
    draft = GlideDraft(target.config, DraftConfig(window=4)).bfloat16()
    draft.initialise()
    with pytest.raises(UserError, match="draft_dtype 'int8' needs float32"):
        prepare_draft(draft, target, "int8")
    assert not isinstance(prepare_draft(draft, target)[0].qkv, ROUNDED)
    with pytest.raises(UserError, match="draft_dtype 'int4' is unknown; there are: auto, int8, target"):
        LongSpec.from_pretrained("smollm2-135m", draft_dtype="int4")
