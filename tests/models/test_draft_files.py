"""Drafts on disk: our folder, the published forms, and whose draft it is."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from longspec import LlamaGlide, LongSpec, Qwen2Glide, UserError
from longspec.config import DraftConfig, ModelConfig
from longspec.data.collate import collate
from longspec.data.shards import Packed, Role
from longspec.models.draft import GlideDraft
from longspec.models.draft_files import Fingerprint, draft_tensors, load_draft, save_draft
from longspec.models.target import Transformer
from longspec.train.layout import head_rows, lay_out
from longspec.train.objective import Objective
from tests.decoding.scripted import tiny_target

OURS = DraftConfig(
    window=9,
    max_lag=3,
    cross_layers=(0, -1),
    use_feature=True,
    final_norm=True,
    draft_vocab=5,
    intermediate_size=40,
    lag_gate=True,
    use_parent=True,
)


def fresh(target: Transformer, config: DraftConfig = OURS) -> GlideDraft:
    draft = GlideDraft(target.config, config)
    draft.initialise(torch.Generator().manual_seed(1))
    if draft.vocab_ids is not None:
        draft.vocab_ids.copy_(torch.tensor([6, 0, 3, 2, 5]))
    return draft


def test_a_draft_comes_back_as_it_was(tmp_path: Path) -> None:
    target = tiny_target()
    draft = fresh(target)
    draft.save_pretrained(tmp_path, target, "tiny", {"chain": [0.5]})
    again = GlideDraft.from_pretrained(tmp_path, target, "tiny")
    assert torch.equal(again.qkv.weight, draft.qkv.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_draft(tmp_path, target, "tiny")
    assert loaded.draft.config == OURS
    assert loaded.acceptance == {"chain": [0.5]}
    for name, tensor in draft.state_dict().items():
        assert torch.equal(loaded.draft.state_dict()[name], tensor)
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize("form", ["folder", "file", "prefixed"])
def test_published_forms_load(tmp_path: Path, form: str) -> None:
    target = tiny_target()
    draft = fresh(target, DraftConfig())
    tensors = draft_tensors(draft)
    # The published layer also has projections for keys and values of cross-attention that nothing uses.
    tensors |= {f"cross_attn.{name}_proj.weight": torch.randn(16, 16) for name in "kv"}
    assert {"self_attn.q_proj.bias", "mlp.up_proj.weight", "post_cross_attention_layernorm.weight"} <= set(
        tensors
    )
    if form == "prefixed":
        tensors = {f"draft_model.{name}": tensor for name, tensor in tensors.items()}
    file = tmp_path / "draft_model_weights.pth"
    torch.save(tensors, file)
    loaded = load_draft(tmp_path if form == "folder" else file, target, "tiny")
    assert loaded.draft.config.window == 513
    for name, tensor in draft.state_dict().items():
        assert torch.equal(loaded.draft.state_dict()[name], tensor)


def test_another_shape_is_refused_and_other_weights_warned_of(tmp_path: Path) -> None:
    target = tiny_target()
    save_draft(fresh(target), tmp_path, Fingerprint.of(target), "tiny-one")
    with pytest.raises(
        UserError, match=r"trained for tiny-one, not for tiny-two: num_layers is 2 there and 3 here"
    ):
        load_draft(tmp_path, tiny_target(num_layers=3), "tiny-two")
    with pytest.warns(UserWarning, match="tiny-one; tiny-two has the same shape but other weights"):
        load_draft(tmp_path, tiny_target(seed=9), "tiny-two")
    # The same target in a coarser type is the same target.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_draft(tmp_path, tiny_target().to(torch.bfloat16), "tiny-one")


def test_what_is_broken_is_named(tmp_path: Path) -> None:
    target = tiny_target()
    draft = fresh(target)
    draft.ffn_norm.weight.data[0] = torch.nan
    save_draft(draft, tmp_path, Fingerprint.of(target), "tiny")
    with pytest.warns(UserWarning, match=r"ffn_norm.weight that are not finite"):
        load_draft(tmp_path, target, "tiny")
    config = json.loads((tmp_path / "config.json").read_text())
    config["draft"]["hyperdrive"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="'hyperdrive'"):
        load_draft(tmp_path, target, "tiny")
    del config["draft"]["hyperdrive"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(UserError, match="is truncated or damaged"):
        load_draft(tmp_path, target, "tiny")
    weights.unlink()
    with pytest.raises(UserError, match="has none of"):
        load_draft(tmp_path, target, "tiny")


def test_a_draft_given_to_from_pretrained_is_used(
    smollm2: LongSpec, smollm2_folder: Path, tmp_path: Path
) -> None:
    target = smollm2.target
    draft = GlideDraft(target.config, DraftConfig(window=64, draft_vocab=100))
    draft.initialise()
    save_draft(draft, tmp_path, Fingerprint.of(target), "smollm2-135m")
    model = LongSpec.from_pretrained(str(smollm2_folder), draft=str(tmp_path))
    answer = model.generate("What is the capital of France?", method="tree", max_new_tokens=12)
    assert answer.text == "The capital of France is Paris."
    assert answer.draft == str(tmp_path)
    assert answer.tree_shape == [4, 16, 16, 16, 11]


TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 49,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize("face", [LlamaGlide, Qwen2Glide])
def test_the_published_faces(face: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kinds: dict[Any, Any] = {
        LlamaGlide: (LlamaConfig, LlamaForCausalLM),
        Qwen2Glide: (Qwen2Config, Qwen2ForCausalLM),
    }
    config = kinds[face][0](**TINY)
    theirs = kinds[face][1](config).eval()
    theirs.save_pretrained(tmp_path / "target")
    model = face(config, tmp_path / "target")
    assert not any(weight.requires_grad for weight in model.model.parameters())
    assert all(weight.requires_grad for weight in model.draft_model.parameters())
    assert model.lm_head is model.model.head
    ids = torch.randint(1, 48, (2, 20))  # no 0: transformers would take it for padding
    lengths = torch.tensor([20, 11])
    expected, num, _ = model.vanilla_generate(ids, lengths, max_gen_len=16)
    for row, length in enumerate(lengths.tolist()):
        out = theirs.generate(ids[row : row + 1, :length], max_new_tokens=16, do_sample=False, pad_token_id=0)
        said = out[0, length:].tolist()
        assert expected[row, : len(said)].tolist() == said
    for output in (
        model.spec_generate(ids, lengths, gamma=3, max_gen_len=16),
        model.tree_spec_generate(ids, lengths, tree_shape=[2, 4], max_gen_len=16),
        model.magicdec_generate(ids, lengths, gamma=3, max_gen_len=16),
    ):
        tokens, count, rounds, seconds, mask = output
        assert torch.equal(tokens, expected)
        assert count == int(mask.sum())
        assert rounds <= num
        assert seconds > 0
    more = torch.randint(1, 48, (3, 50))
    model.vanilla_generate(more, torch.tensor(50), max_gen_len=30)  # more than there was room for
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.draft_model.parameters():
            weight.add_(0.1)
    assert torch.equal(other.spec_generate(ids, lengths, max_gen_len=16)[0], expected)
    assert all(weight.requires_grad for weight in model.draft_model.parameters())
    whole = Packed(ids[0].numpy(), np.full(20, Role.TEXT, np.uint8), np.zeros(1, np.int32))
    rows = head_rows(None, TINY["vocab_size"])
    layout = lay_out(collate([whole], "base", False), [[2]], [0], 4, rows, model.model.device)
    Objective(model.model, model.draft_model)(layout).loss.backward()
    assert all(weight.grad is not None for weight in model.draft_model.parameters())
    again = face.from_pretrained(
        tmp_path / "target",
        state_dict=model.draft_model.state_dict(),
        torch_dtype=torch.float32,
        attn_implementation="eager",
    )
    assert torch.equal(again.draft_model.qkv.weight, model.draft_model.qkv.weight)
    assert torch.equal(again.tree_spec_generate(ids, lengths, max_gen_len=16)[0], expected)
    from longspec.train.models import llama_glide, qwen2_glide

    assert face in (getattr(llama_glide, "LlamaGlide"), getattr(qwen2_glide, "Qwen2Glide"))  # noqa: B009


def test_a_face_refuses_another_family(smollm2_folder: Path) -> None:
    with pytest.raises(UserError, match="Qwen2Glide is for qwen2"):
        Qwen2Glide(None, smollm2_folder)


def test_a_face_refuses_what_it_cannot_answer(tiny_folder: Path) -> None:
    model = LlamaGlide(None, tiny_folder, device="cpu", seed=0)
    ids, lengths = torch.tensor([[1000, 1001, 1002]]), torch.tensor([3])
    assert model.vanilla_generate(ids, lengths, max_gen_len=2)[0].shape == (1, 2)
    wrong: list[tuple[Any, Any, int, str]] = [
        (ids, lengths, -1, "max_gen_len is -1"),
        ([[1000, 1001]], lengths, 2, r"input_ids is \[\[1000, 1001\]\]; a tensor"),
        (ids, torch.tensor([4]), 2, "one of prompt_length is 4; it must lie between 1 and 3"),
    ]
    for tokens, counts, new, named in wrong:
        with pytest.raises(UserError, match=named):
            model.spec_generate(tokens, counts, max_gen_len=new)


def test_pushing_without_a_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    target = tiny_target()
    with pytest.raises(UserError, match="cannot push the draft to me/draft: "):
        fresh(target).push_to_hub("me/draft", target, "tiny")


def test_cross_layers_must_exist() -> None:
    shape = ModelConfig("llama", 8, 8, 8, 2, 2, 2, 4, 64)
    with pytest.raises(UserError, match="cross layer 2 is not among the target's 2 layers"):
        GlideDraft(shape, DraftConfig(cross_layers=(2,)))
