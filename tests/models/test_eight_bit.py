"""Weights of 8 bits: close to the weights they come from, taken over from quantised checkpoints of several
layouts, equal to `transformers` over the same weights, and the words of vanilla by every method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from longspec import UserError
from longspec.attention import choose_backend
from longspec.cache import Pages
from longspec.decoding.methods import VANILLA, Lookup, Method, Seq, Tree
from longspec.decoding.sampling import Sampling
from longspec.engine.load import prepare_draft
from longspec.models.checkpoint import WeightFiles
from longspec.models.eight_bit import KINDS, EightBit, EightBitForm, EightBitLinear
from longspec.models.files import read_config
from longspec.models.layers import CpuLinear, Linear
from longspec.models.load import load_target, pack_ends
from longspec.models.pair import load_pair
from longspec.models.target import Transformer
from longspec.models.weights import GPU_ROUNDINGS, Precision, pack, pick_precision
from tests.decoding.scripted import ask, pass_over, tiny_draft, tiny_engine, tiny_target

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.2,
}  # fmt: skip
Stored = dict[str, Tensor]


def of_rows(kind: torch.dtype) -> Callable[[str, Tensor], tuple[Stored, Tensor]]:
    """One scale per row."""

    def store(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        matrix = EightBit.rounded(weight, kind)
        return {name: matrix.values, f"{name}_scale": matrix.scales}, matrix.expanded(torch.float32)

    return store


def of_matrices(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """One scale for all, in bf16."""
    scale = (weight.abs().max() / 448).bfloat16()
    values = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {name: values, f"{name}_scale": scale}, values.float() * scale.float()


def of_blocks(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """One scale for every 32 x 32 weights, as transformers' fp8 has for 128 x 128."""
    rows, columns = (-(-size // 32) for size in weight.shape)
    scales = torch.rand(rows, columns) + 0.5
    scales *= weight.abs().max() / 200
    every = scales.repeat_interleave(32, 0)[: len(weight)].repeat_interleave(32, 1)[:, : weight.shape[1]]
    values = (weight / every).to(torch.float8_e4m3fn)
    return {name: values, f"{name}_scale_inv": scales}, values.float() * every


def of_words(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """int8 with one scale for every 16 weights, four of them in a word."""
    groups = weight.unflatten(1, (-1, 16))
    scales = groups.abs().amax(2, keepdim=True) / 127
    values = (groups / scales).round()
    bytes_of = (values.flatten(1) + 128).to(torch.uint8)
    words = sum(bytes_of[:, place::4].long() << 8 * place for place in range(4))
    assert isinstance(words, Tensor)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    stored = {f"{name}_packed": packed, f"{name}_shape": torch.tensor(weight.shape)}
    return stored | {f"{name}_scale": scales[:, :, 0]}, (values * scales).flatten(1)


def compressed(form: str, kind: str, strategy: str, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True} | changes
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return config | {"ignore": ["lm_head", "re:.*layers.1.self_attn.o_proj"]}


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], tuple[Stored, Tensor]]]] = {
    "int8 of compressed-tensors": (compressed("int-quantized", "int", "channel"), of_rows(torch.int8)),
    "fp8 of compressed-tensors": (
        compressed("float-quantized", "float", "channel"), of_rows(torch.float8_e4m3fn)
    ),
    "fp8 by matrix": (compressed("float-quantized", "float", "tensor"), of_matrices),
    "packed int8": (compressed("pack-quantized", "int", "group", group_size=16), of_words),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, of_rows(torch.float8_e4m3fn)),
    "fp8 by block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}, of_blocks
    ),
}  # fmt: skip


def write(folder: Path, layout: str, change: Callable[[Stored], object] = lambda stored: None) -> Any:
    """A quantised checkpoint; and the model of `transformers` that has its weights, expanded."""
    torch.manual_seed(3)
    config = LlamaConfig(**SHAPE)
    model = LlamaForCausalLM(config).eval()
    scheme, store = LAYOUTS[layout]
    tensors: Stored = {}
    for name, weight in model.state_dict().items():
        if "_proj" in name and "layers.1.self_attn.o_proj" not in name:
            stored, expanded = store(name, weight)
            tensors |= stored
            model.get_parameter(name).data.copy_(expanded)
        else:
            tensors[name] = weight.clone()
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    values = config.to_dict() | {"quantization_config": scheme, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(values))
    return model


def load(folder: Path, precision: Precision) -> Transformer:
    with WeightFiles(folder) as weights:
        return load_target(read_config(folder), weights.tensor, CPU, precision)


def named_linears(target: Transformer) -> list[str]:
    """The names of the target's linears, in whatever form."""
    linears = (EightBitLinear, Linear, CpuLinear)
    return [name for name, one in target.named_modules() if isinstance(one, linears)]


@torch.inference_mode()
def logits(target: Transformer, tokens: Tensor) -> Tensor:
    pages = Pages.empty(target.config, 8, 16, CPU, target.kv_dtype)
    tables = torch.arange(1, 9, dtype=torch.int32)[None]
    return target.logits(pass_over(target, pages, tables, torch.tensor([0]), tokens))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantised_checkpoints_give_what_transformers_gives(layout: str, tmp_path: Path) -> None:
    model = write(tmp_path, layout)
    quantisation = read_config(tmp_path).quantisation
    assert quantisation is not None
    tokens = torch.randint(211, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens).logits
    assert expected.std() > 0.3, "flat logits would match anything"
    expanded = load(tmp_path, pick_precision("auto", torch.float32, CPU, quantisation))
    assert expanded.weights == "float32"
    torch.testing.assert_close(logits(expanded, tokens), expected, atol=1e-4, rtol=0)
    # As on a GPU: the 8 bits are kept, what is not quantised stays as it is.
    kept = load(tmp_path, Precision(torch.float32, None, quantisation.kind))
    assert kept.weights == quantisation.kind
    linears = [
        name for name in named_linears(kept) if not isinstance(kept.get_submodule(name), EightBitLinear)
    ]
    assert linears == ["blocks.1.attention.output", "head"]
    torch.testing.assert_close(logits(kept, tokens), expected, atol=1e-4, rtol=0)
    # Asked for by name, the rest is rounded too.
    rounded = load(tmp_path, Precision(torch.float32, GPU_ROUNDINGS[quantisation.kind], quantisation.kind))
    assert all(isinstance(rounded.get_submodule(name), EightBitLinear) for name in named_linears(rounded))
    error = (logits(rounded, tokens) - expected).norm() / expected.norm()
    assert 0 < error < 0.06


def test_a_draft_is_trained_over_the_expanded_weights(tmp_path: Path) -> None:
    model = write(tmp_path, "fbgemm")
    pair = load_pair(str(tmp_path), None, None, CPU, torch.float32, seed=0)
    assert pair.target.weights == "float32"
    down = pair.target.get_submodule("blocks.0.ffn.down")
    assert isinstance(down, Linear)
    assert torch.equal(down.weight, model.model.layers[0].mlp.down_proj.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_and_products(kind: str) -> None:
    torch.manual_seed(0)
    linear = Linear(96, 40, bias=True).requires_grad_(False)
    assert linear.bias is not None
    linear.bias.normal_()
    linear.weight.copy_(torch.randn(40, 96) * torch.rand(40, 1))
    linear.weight[3] = 0
    form = EightBitForm(KINDS[kind])(linear)
    assert isinstance(form, EightBitLinear)
    kept = form.weight_rows(None)
    steps = linear.weight.abs().amax(1, keepdim=True) / 254 if kind == "int8" else linear.weight.abs() / 16
    assert bool(
        ((kept - linear.weight).abs() <= steps * 1.001 + linear.weight.abs().amax(1, True) / 2**17).all()
    )
    x, total = torch.randn(2, 5, 96), torch.randn(2, 5, 40)
    torch.testing.assert_close(form(x), x @ kept.T + linear.bias)
    torch.testing.assert_close(form.add_to(total.clone(), x), total + form(x))
    torch.testing.assert_close(form.scores(x, False), x @ kept.T)
    assert torch.equal(form.weight_rows(torch.tensor([7, 0])), kept[[7, 0]])


def eight_bit_target(kind: str, backend: str) -> Transformer:
    target = tiny_target(3, vocab_size=40)
    precision = Precision(torch.float32, GPU_ROUNDINGS[kind], kind)
    pack(target.blocks, precision)
    pack_ends(target, precision)
    target.attention = choose_backend(backend)
    return target


def answers(kind: str, backend: str, method: Method) -> list[list[int]]:
    target = eight_bit_target(kind, backend)
    draft = tiny_draft(target, window=6, max_lag=3, draft_vocab=20)
    assert draft.vocab_ids is not None
    draft.vocab_ids.copy_(torch.arange(1, 40, 2))
    draft, head = prepare_draft(draft, target)
    assert isinstance(draft.qkv, EightBitLinear)
    # The target's own bytes, not rounded again.
    assert isinstance(head.rows, EightBitLinear)
    assert isinstance(target.head, EightBitLinear)
    bytes_of_head = target.head.values.view(torch.uint8)
    assert torch.equal(head.rows.values.view(torch.uint8), bytes_of_head[draft.vocab_ids])
    engine = tiny_engine(target, draft, max_length=48, max_rows=2, num_pages=12)
    engine.models.head = head
    assert engine.models.fused == (backend == "triton")
    return [one.tokens for one in ask(engine, [[3, 1, 4, 1, 5] * 4, [2, 7]], method, Sampling(), new=5)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_says_what_vanilla_says(kind: str) -> None:
    plain = answers(kind, "torch", VANILLA)
    assert [len(one) for one in plain] == [5, 2]
    for method in (Tree((2, 3), max_nodes=5), Seq(2), Lookup(2)):
        assert answers(kind, "torch", method) == plain


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_our_kernels_say_the_same(kind: str) -> None:
    assert answers(kind, "triton", Tree((2, 3), max_nodes=5)) == answers(kind, "torch", VANILLA)


@torch.inference_mode()
def test_our_kernels_compute_what_the_expanded_weights_give() -> None:
    """A prompt, then one token, whose products have a kernel of their own."""
    tokens, tables = torch.arange(6)[None], torch.tensor([[2, 1]], dtype=torch.int32)
    found = []
    for backend in ("torch", "triton"):
        target = eight_bit_target("fp8", backend)
        pages = Pages.empty(target.config, 2, 16, CPU, torch.float32)
        fused = backend == "triton"
        for start, end in ((0, 5), (5, 6)):
            hidden = pass_over(
                target, pages, tables, torch.tensor([start]), tokens[:, start:end], fused=fused
            )
            found.append(target.logits(hidden[:, -1], exact=fused))
    torch.testing.assert_close(found[:2], found[2:], rtol=1e-4, atol=1e-4)


PROJECTION = "model.layers.1.mlp.up_proj.weight"
SCALE = f"{PROJECTION}_scale"
BROKEN: dict[str, tuple[str, Callable[[Stored], object], str]] = {
    "nan": ("fbgemm", lambda stored: stored[SCALE][3].fill_(torch.nan), "not numbers above 0"),
    "zero": ("fbgemm", lambda stored: stored[SCALE][0].zero_(), "not numbers above 0"),
    "shape": (
        "fbgemm",
        lambda stored: stored.update({f"{PROJECTION}_scale": torch.ones(5, 1)}),
        r"_scale' has shape \(5, 1\), which does not fit a weight of \(96, 64\)",
    ),
    "block": (
        "fp8 by block",
        lambda stored: stored.update({f"{PROJECTION}_scale_inv": torch.ones(2, 2)}),
        r"_scale_inv' has shape \(2, 2\), which does not fit",
    ),
    "missing": ("fbgemm", lambda stored: stored.pop(f"{PROJECTION}_scale"), "has no tensor '.*_scale'"),
    "value": (
        "fbgemm",
        lambda stored: stored[PROJECTION].view(torch.uint8)[0, 0].fill_(0xFF),
        "has values that are not finite",
    ),
    "type": (
        "fbgemm",
        lambda stored: stored.update({PROJECTION: torch.ones(96, 64, dtype=torch.int8)}),
        "int8; its quantization_config says fp8",
    ),
    "words": (
        "packed int8",
        lambda stored: stored.update({f"{PROJECTION}_shape": torch.tensor([96, 60])}),
        r"does not fit '.*_shape' \[96, 60\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_checkpoints_are_refused(broken: str, tmp_path: Path) -> None:
    layout, change, message = BROKEN[broken]
    write(tmp_path, layout, change)
    with pytest.raises(UserError, match=message):
        load(tmp_path, Precision(torch.float32))


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"quant_method": name}, f"quantised with '{name}' are not supported")
        for name in ("awq", "gptq", "mxfp4")
    ),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quantised with 'bitsandbytes'"),
    (compressed("pack-quantized", "int", "group", num_bits=4), "weights = '4-bit int' is not supported"),
    (compressed("nvfp4-pack-quantized", "float", "group"), "format = 'nvfp4-pack-quantized'"),
    (compressed("int-quantized", "int", "channel", symmetric=False), "symmetric = False"),
    (compressed("pack-quantized", "int", "group", actorder="group"), "actorder = 'group'"),
    (compressed("float-quantized", "float", "channel") | {"sparsity_config": {"format": "x"}}, "sparsity"),
    ({"quant_method": "compressed-tensors"}, "config_groups = None"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"blocks of \[128\]"),
]


@pytest.mark.parametrize(("scheme", "message"), REFUSED)
def test_other_layouts_are_refused_by_name(scheme: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = LlamaConfig(**SHAPE).to_dict() | {"quantization_config": scheme}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


def test_a_gpu_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert pick_precision("int8", half, GPU).weights == "int8"
    with pytest.raises(UserError, match=r"'fp8' needs a GPU of compute capability 8.9 .* has 8.0; use int8"):
        pick_precision("fp8", half, GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert pick_precision("fp8", half, GPU).weights == "fp8"
    with pytest.raises(UserError, match="weights 'fp8' do not go with float32 on cuda"):
        pick_precision("fp8", torch.float32, GPU)
    with pytest.raises(UserError, match="weights 'fp8' do not go with float32 on cpu"):
        pick_precision("fp8", torch.float32, CPU)
    with pytest.raises(UserError, match="weights 'int4' do not go with bfloat16 on cuda"):
        pick_precision("int4", half, GPU)
