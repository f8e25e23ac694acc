"""Weights on a CPU in every form: close to the weights they come from, the same bits whatever runs beside,
and the words of vanilla by every method."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longspec import Generation, LongSpec, UserError
from longspec.cache import Pages
from longspec.decoding.methods import VANILLA, Lookup, MagicDec, Method, Seq, Tree
from longspec.decoding.sampling import Sampling
from longspec.models import native_linears
from longspec.models.layers import Linear, RMSNorm
from longspec.models.load import pack_ends
from longspec.models.native_linears import (
    EIGHT_BITS,
    FOUR_BITS,
    FloatForm,
    NativeFineLinear,
    NativeFloatLinear,
    NativeGridLinear,
    NativeLevelLinear,
    NativeLinear,
    _find_grids,
    has_native_products,
    packed,
)
from longspec.models.tables import Int8Table
from longspec.models.target import Transformer
from longspec.models.weights import _KEPT_BYTES, ROUNDINGS, Precision, pack, pick_precision
from longspec.native.build import _compiler, _load, code, what_is_missing
from tests.cli.run import exit_code
from tests.decoding.scripted import ask, pass_over, tiny_draft, tiny_engine, tiny_target
from tests.hub.gguf_samples import encode

POSSIBLE = list(ROUNDINGS) if has_native_products() else []
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FORMS: dict[str, Callable[[Linear], Any]] = {"int8": EIGHT_BITS, "int4": FOUR_BITS}
FORMS |= {name: FloatForm(dtype, rounds=True) for name, dtype in FLOATS.items()}
EXACT = [*POSSIBLE, *(["float32"] if has_native_products() else [])]


def linear_of(weight: Tensor, bias: bool = False) -> Linear:
    linear = Linear(weight.shape[1], weight.shape[0], bias).requires_grad_(False)
    linear.weight.copy_(weight)
    if linear.bias is not None:
        torch.nn.init.normal_(linear.bias)
    return linear


def target_in(name: str) -> Transformer:
    """A random target of sizes that every form has."""
    target = tiny_target(vocab_size=64, hidden_size=64, intermediate_size=128, num_heads=4, head_dim=16)
    precision = Precision(torch.float32, ROUNDINGS.get(name), "" if name == "float32" else name)
    pack(target.blocks, precision)
    pack_ends(target, precision)
    return target


def test_our_code_compiles_where_there_is_a_compiler() -> None:
    """Or the tests of it would be skipped."""
    if not _compiler():
        pytest.skip("no C compiler here")
    assert has_native_products(), what_is_missing()


@pytest.mark.parametrize("name", EXACT)
def test_a_rows_product_has_the_same_bits_alone_and_among_others(name: str) -> None:
    torch.manual_seed(0)
    for num_out, num_in in ((192, 576), (576, 1536), (128, 96)):
        form = FORMS[name](linear_of(torch.randn(num_out, num_in) * 0.05, bias=num_out == 192))
        rows = torch.randn(300, num_in) * torch.rand(300, 1) * 8
        rows[3] *= 1e4  # the range of a whole batch would be this one's
        whole = form(rows)
        for count in (1, 2, 5, 16, 64):
            assert torch.equal(form(rows[:count]), whole[:count])
        assert torch.equal(form(rows[7]), whole[7])
        total = torch.randn(300, num_out)
        alone = form.add_to(total[:1].clone(), rows[:1])
        assert torch.equal(form.add_to(total, rows)[:1], alone)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_products_of_integers_are_those_of_the_rounded_weights(name: str) -> None:
    if name not in POSSIBLE:
        pytest.skip("no C compiler here")
    torch.manual_seed(0)
    weight = torch.randn(99, 575) * 0.05  # neither fills its vectors, and the last run is shorter
    weight[3], weight[4], weight[5, 64:128] = 0, weight[4] * 1000, 0.3
    linear = linear_of(weight, bias=True)
    form, rows = FORMS[name](linear), torch.randn(6, 575)
    rows[1], rows[2, 7] = 0, 3000.0  # a row without a scale, and one number that is nearly all of its row
    rows[5, 9] = torch.inf
    kept, product = form.weight_rows(None), form(rows)
    assert linear.bias is not None
    for index in (0, 2, 3, 4):
        exact = rows[index].double() @ kept.double().T + linear.bias
        assert (product[index] - exact).norm() / exact.norm() < 1e-4
    assert torch.equal(product[1], linear.bias)
    assert product[5].isnan().all(), "what overflows is seen, and only in its own row"
    levels, run = (255, 64) if name == "int8" else (15, 32)
    for row, old in zip(kept.split(run, 1), weight.split(run, 1), strict=True):
        steps = (old.amax(1).clamp(min=0) - old.amin(1).clamp(max=0)) / levels
        assert ((row - old).abs().amax(1) <= steps * 0.5001 + 1e-7 * old.abs().amax(1)).all()
    assert torch.equal(form.weight_rows(torch.tensor([4, 0])), kept[[4, 0]])
    # The largest sums there are.
    largest = FORMS[name](linear_of(torch.ones(16, 20000) * torch.tensor([0.0, 1.0, 1.0, 1.0]).repeat(5000)))
    torch.testing.assert_close(largest(torch.ones(2, 20000)), torch.full((2, 16), 15000.0))


@pytest.mark.parametrize("name", FLOATS)
def test_a_checkpoint_of_two_bytes_has_the_products_of_four(name: str) -> None:
    if "float32" not in EXACT:
        pytest.skip("no C compiler here")
    torch.manual_seed(0)
    weight = (torch.randn(99, 575) * 0.05).to(FLOATS[name]).float()  # the outputs do not fill their vectors
    # The smallest and the largest that fp16 has, and a number that its kind has alone.
    weight[5, :4] = torch.tensor([2.0**-24, -(2.0**-15), 65504.0, 0.0]).to(FLOATS[name]).float()
    weight[6, 0] = {"float32": 1 + 2**-20, "float16": 1 + 2**-10, "bfloat16": 2.0**100}[name]
    linear = linear_of(weight, bias=True)
    form, in_fp32 = packed(linear), NativeFloatLinear(linear, linear.weight)
    assert isinstance(form, NativeFloatLinear)
    assert form.weight.dtype == FLOATS[name]
    for count in (1, 7, 8, 29):
        rows = torch.randn(count, 575)
        assert torch.equal(form(rows), in_fp32(rows))
        torch.testing.assert_close(form(rows), linear(rows), rtol=1e-5, atol=1e-5 * form(rows).abs().max())
    assert torch.equal(form.weight_rows(None), linear.weight)
    assert torch.equal(form.weight_rows(torch.tensor([4, 98])), linear.weight[[4, 98]])


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
)
def test_a_ggufs_weights_keep_few_bits_and_the_precision_of_fp32(kind: str) -> None:
    if "float32" not in EXACT:
        pytest.skip("no C compiler here")
    torch.manual_seed(0)
    values = np.random.default_rng(0).standard_normal((99, 512), np.float32) * 0.05
    weight = torch.from_numpy(encode(values, kind)[1]).clone()  # the outputs do not fill their vectors
    weight[3], weight[4, :64] = 0, 0.25  # runs of one value
    linear = linear_of(weight, bias=True)
    form, in_fp32 = packed(linear), NativeFloatLinear(linear, linear.weight)
    assert isinstance(form, NativeGridLinear)
    assert form.weight.dtype == torch.uint8
    padded = -(-99 // (2 * code().lanes())) * 2 * code().lanes() * 512
    assert form.weight.nbytes + form.grids.nbytes <= padded * _KEPT_BYTES[kind]
    found = _find_grids(linear.weight)
    assert found is not None
    as_numbers, as_integers = (kind(linear, *found) for kind in (NativeGridLinear, NativeFineLinear))
    assert type(form) is (NativeFineLinear if code().multiplies_bytes() else NativeGridLinear)
    for count in (1, 7, 8, 29, 130):
        rows = torch.randn(count, 512) * torch.rand(count, 1) * 9
        rows[:, 5] *= 1000
        assert torch.equal(as_numbers(rows), in_fp32(rows))
        assert linear.bias is not None
        exact = rows.double() @ weight.double().T + linear.bias
        errors = [float((one(rows) - exact).norm()) for one in (as_integers, in_fp32)]
        assert errors[0] <= 1.5 * errors[1], "as precise as fp32"
    assert torch.equal(form.weight_rows(None), weight)
    assert torch.equal(form.weight_rows(torch.tensor([4, 98])), weight[[4, 98]])
    in_integers = EIGHT_BITS(linear)
    assert isinstance(in_integers, NativeLevelLinear)
    assert in_integers.weight.nbytes + in_integers.grids.nbytes == form.weight.nbytes + form.grids.nbytes
    assert torch.equal(in_integers.weight_rows(None), weight), "what lies on grids is not rounded again"
    rows = torch.randn(3, 512)
    assert (in_integers(rows) - form(rows)).norm() / form(rows).norm() < 1e-4
    few = FOUR_BITS(linear)
    assert isinstance(few, NativeLevelLinear)
    assert few.shares_bytes
    assert torch.equal(few.weight_rows(None), weight) or not form.shares_bytes
    linear.weight[4, :64] = 0.3
    again = packed(linear)
    assert isinstance(again, NativeGridLinear)
    assert again.grids.dtype == torch.float32, "which fp16 does not have"
    in_fp32 = NativeFloatLinear(linear, linear.weight)
    assert (again(rows) - in_fp32(rows)).norm() / in_fp32(rows).norm() < 1e-5
    for wrong in (torch.nextafter(weight[98, 511], torch.tensor(9.0)), torch.nan, torch.inf):
        linear.weight[98, 511] = wrong
        assert not isinstance(packed(linear), NativeGridLinear), "one weight is on no grid"


def test_the_default_targets_weights_keep_4_bits_and_its_heads_8(smollm2: LongSpec) -> None:
    if "float32" not in EXACT:
        pytest.skip("no C compiler here")
    for name in ("attention.qkv", "attention.output", "ffn.gate_up", "ffn.down"):
        form = smollm2.target.first_block.get_submodule(name)
        assert isinstance(form, NativeGridLinear)
        assert form.weight.numel() == form.num_in * form.num_out / 2
    assert isinstance(smollm2.target.get_submodule("head"), NativeGridLinear)


@pytest.mark.parametrize("kind", FORMS.values())
def test_products_with_what_is_around_them(kind: Callable[[Linear], NativeLinear]) -> None:
    if "int8" not in POSSIBLE:
        pytest.skip("no C compiler here")
    torch.manual_seed(0)
    form, norm = kind(linear_of(torch.randn(48, 96) * 0.1)), RMSNorm(96, 1e-5)
    norm.weight.data.normal_()
    x, total, gate_up = torch.randn(9, 96), torch.randn(9, 48), torch.randn(9, 192) * 4
    gate_up[0, :6] = torch.tensor([-88.0, -89.5, -110.0, -178.0, -300.0, -3e7])  # all are 0 behind the gate
    with torch.inference_mode():
        torch.testing.assert_close(form.normed(norm, x), form(norm(x)), rtol=1e-3, atol=1e-3)
        gate, up = gate_up.chunk(2, -1)
        wanted = total + form(torch.nn.functional.silu(gate) * up)
        torch.testing.assert_close(form.add_gated(total, gate_up), wanted, rtol=1e-3, atol=1e-3)


def test_the_embedding_gives_rows_back() -> None:
    table = torch.randn(50, 32) * torch.rand(50, 1)
    found = Int8Table(table)(torch.tensor([[3, 49]]))
    assert found.shape == (1, 2, 32)
    assert (found[0, 1] - table[49]).abs().max() <= table[49].abs().max() / 254 * 1.001


@pytest.mark.parametrize("name", EXACT)
def test_a_trees_nodes_have_the_numbers_of_vanilla_steps(name: str) -> None:
    torch.manual_seed(0)
    target, prompt = target_in(name), torch.randint(64, (1, 90))
    parents = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7]
    sees = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        step = node
        while step >= 0:
            sees[node, step], step = True, parents[step]
    nodes = torch.randint(64, (1, len(parents)))

    def filled() -> tuple[Pages, Tensor]:
        pages = Pages.empty(target.config, 8, 16, target.device, target.kv_dtype)
        tables = torch.arange(1, 9, dtype=torch.int32)[None]
        pass_over(target, pages, tables, torch.tensor([0]), prompt)
        return pages, tables

    with torch.inference_mode():
        of_tree = target.logits(pass_over(target, *filled(), torch.tensor([90]), nodes, sees))
        for node in (0, 3, 8, 10):
            pages, tables = filled()
            path = sees[node].nonzero().flatten().tolist()
            for depth, one in enumerate(path):
                length = torch.tensor([90 + depth])
                found = target.logits(pass_over(target, pages, tables, length, nodes[:, one : one + 1]))
            assert torch.equal(found[0, 0], of_tree[0, node])


@pytest.mark.parametrize("name", EXACT)
def test_a_prompt_has_the_same_numbers_however_it_is_cut(name: str) -> None:
    torch.manual_seed(0)
    target, prompt = target_in(name), torch.randint(64, (1, 600))
    tables = torch.randperm(40, dtype=torch.int32)[None]
    found = []
    for sizes in ([600], [70, 1, 65, 464], [3, 64, 533], [1] * 600):
        pages = Pages.empty(target.config, 40, 16, target.device, target.kv_dtype)
        hidden, start = [], 0
        with torch.inference_mode():
            for size in sizes:
                tokens = prompt[:, start : start + size]
                hidden.append(pass_over(target, pages, tables, torch.tensor([start]), tokens))
                start += size
        found.append((torch.cat(hidden, 1), pages.keys, pages.values))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)], ids=["greedy", "sampled"])
def test_every_method_says_what_vanilla_says(name: str, sampling: Sampling) -> None:
    target = target_in(name)
    engine = tiny_engine(target, tiny_draft(target, draft_vocab=32))
    prompts = [list(range(5, 45)), [9, 4] * 30, [3]]
    alone = [
        ask(engine, [prompt], VANILLA, sampling, seed, 40)[0].tokens for seed, prompt in enumerate(prompts)
    ]
    methods: tuple[Method, ...] = (VANILLA, Seq(3), Tree((3, 6, 6)), Lookup(4), MagicDec(3))
    for method in methods:
        together = ask(engine, prompts, method, sampling, new=40)
        for one, said in zip(together, alone, strict=True):
            assert one.tokens == said[: len(one.tokens)]
            assert len(one.tokens) > 10


@pytest.mark.parametrize("weights", POSSIBLE)
def test_loading_keeps_the_words_close_and_tells_the_weights(
    weights: str, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = LongSpec.from_pretrained(tiny_folder, device="cpu", calibrate=False)
    model = LongSpec.from_pretrained(tiny_folder, device="cpu", weights=weights, calibrate=False)
    assert all("norm" in name or not one.numel() for name, one in model.target.named_parameters())
    tokens = torch.randint(49152, (1, 60), generator=torch.Generator().manual_seed(0))
    scores = []
    with torch.inference_mode():
        for target in (plain.target, model.target):
            pages = Pages.empty(target.config, 4, 16, target.device, target.kv_dtype)
            tables = torch.arange(1, 5, dtype=torch.int32)[None]
            scores.append(target.logits(pass_over(target, pages, tables, torch.tensor([0]), tokens)))
    # Random weights of 4 bits lose much, and they lose more with every layer.
    assert (scores[0] - scores[1]).norm() / scores[0].norm() < (0.8 if weights == "int4" else 0.1)
    short = ["--json", "--no-calibrate", "--max-new-tokens", "3", "--device", "cpu"]
    ended = exit_code(["generate", "hi", "--target", str(tiny_folder), "--weights", weights, *short])
    told = json.loads(capsys.readouterr().out)
    assert (ended, told["weights"], told["dtype"]) == (0, weights, "float32")
    assert exit_code(["info", str(tiny_folder), "--weights", weights, "--device", "cpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["weights"] == weights
    assert facts["needs"]["weights"] < plain.target.config.num_parameters * 4


def test_a_checkpoint_in_bf16_stays_so_and_says_the_same(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "float32" not in EXACT:
        pytest.skip("no C compiler here")
    from safetensors.torch import load_file, save_file

    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    halves = {name: one.bfloat16() for name, one in tensors.items()}
    save_file(halves, tmp_path / "model.safetensors", {"format": "pt"})
    answers: list[list[Generation]] = []
    for forms in (native_linears._FP32_FORMS, native_linears._FP32_FORMS[3:]):
        monkeypatch.setattr(native_linears, "_FP32_FORMS", forms)
        model = LongSpec.from_pretrained(tmp_path, device="cpu", calibrate=False)
        kept = {one.weight.dtype for one in model.target.modules() if isinstance(one, NativeFloatLinear)}
        assert kept == {torch.bfloat16 if len(answers) == 0 else torch.float32}
        answers.append([model.generate("Once", max_new_tokens=40, seed=1, temperature=t) for t in (0.0, 1.0)])
    for one, other in zip(*answers, strict=True):
        assert one.token_ids == other.token_ids


def test_what_cannot_be_is_refused() -> None:
    cpu = torch.device("cpu")
    assert pick_precision("auto", torch.bfloat16, cpu).weights == "bfloat16"
    with pytest.raises(
        UserError, match="weights 'int3' is unknown; there are: auto, float32, float16, bfloat16"
    ):
        pick_precision("int3", torch.float32, cpu)
    with pytest.raises(UserError, match="weights 'int4' do not go with bfloat16 on cuda: there, use auto"):
        pick_precision("int4", torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize(
    "flags",
    ["-mno-avx512vnni", "-mno-avx512f", "-mno-avx512f -mno-avxvnni", "-mno-avx512f -mno-avxvnni -mno-avx2"],
)
def test_older_processors_get_the_same_bits_for_a_node(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "int8" not in POSSIBLE or platform.machine() != "x86_64":
        pytest.skip("no C compiler here, or no such flags")
    here = code().lanes()
    monkeypatch.setenv("CC", f"cc {flags}")
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    _load.cache_clear()
    try:
        assert code().lanes() == (8 if "512f" in flags else here)
        for name in FLOATS:
            test_a_checkpoint_of_two_bytes_has_the_products_of_four(name)
        for kind in ("Q4_1", "Q6_K"):
            test_a_ggufs_weights_keep_few_bits_and_the_precision_of_fp32(kind)
        for name in ("int8", "int4"):
            test_products_of_integers_are_those_of_the_rounded_weights(name)
        for name in EXACT:
            test_a_trees_nodes_have_the_numbers_of_vanilla_steps(name)
            test_a_prompt_has_the_same_numbers_however_it_is_cut(name)
    finally:
        _load.cache_clear()


@pytest.mark.parametrize("compiler", ["false", "/nowhere/cc"])
def test_without_a_compiler_int8_is_refused_and_all_else_works(
    compiler: str,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path))
    ask_it = ["generate", "hi", "--target", str(tiny_folder), "--no-calibrate", "--max-new-tokens", "3"]
    _load.cache_clear()
    try:
        assert exit_code([*ask_it, "--device", "cpu", "--weights", "int8"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "weights 'int8' need a C compiler with OpenMP, such as gcc, and there is none (" in error
        assert compiler in error
        assert exit_code([*ask_it, "--device", "cpu"]) == 0
        assert not [*tmp_path.rglob("*.so")]
    finally:
        _load.cache_clear()


def test_weights_that_are_not_finite_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"'model.layers.1.mlp.down_proj.weight' has values that are not finite"
    ):
        LongSpec.from_pretrained(tmp_path, weights="int8", device="cpu", calibrate=False)
