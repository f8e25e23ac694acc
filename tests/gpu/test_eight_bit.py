"""Weights of 8 bits on a GPU: captured rounds say what the expanded weights say on a CPU, and what is loaded
takes less memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longspec import LongSpec
from longspec.attention import choose_backend
from longspec.cache import Pages
from longspec.decoding.methods import VANILLA, Lookup, MagicDec, Seq, Tree
from longspec.decoding.sampling import Sampling
from longspec.engine.engine import Engine
from longspec.models.eight_bit import EightBitLinear
from longspec.models.load import pack_ends
from longspec.models.target import Transformer
from longspec.models.weights import GPU_ROUNDINGS, Precision, pack
from tests.cli.run import exit_code
from tests.decoding.scripted import ask, pass_over, tiny_draft, tiny_engine, tiny_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KINDS = [
    "int8",
    pytest.param(
        "fp8",
        marks=pytest.mark.skipif(
            torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs fp8"
        ),
    ),
]
METHODS = (VANILLA, Seq(gamma=4), Tree((4, 8, 8), max_nodes=16), MagicDec(3, sinks=2, window=6), Lookup(4))
PROMPTS = [[(7 * place * place + 3) % 40 for place in range(length)] for length in (17, 3, 40, 300)]


def rounded_target(kind: str, device: str, dtype: torch.dtype = torch.float32) -> Transformer:
    """Rounded on the CPU, so that all devices have the same weights."""
    shape = {"vocab_size": 40, "num_layers": 3, "hidden_size": 64, "head_dim": 32, "max_length": 1024}
    target = tiny_target(3, **shape).to(dtype)
    precision = Precision(dtype, GPU_ROUNDINGS[kind], kind)
    pack(target.blocks, precision)
    pack_ends(target, precision)
    target.attention = choose_backend("torch" if device == "cpu" else "triton")
    return target.to(device)


def engine_on(device: str, kind: str) -> Engine:
    target = rounded_target(kind, device)
    engine = tiny_engine(target, tiny_draft(target), max_length=400, num_pages=160)
    assert engine.models.fused == (device != "cpu")
    return engine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.9)], ids=["greedy", "sampled"])
def test_captured_rounds_say_what_the_expanded_weights_say(kind: str, sampling: Sampling) -> None:
    """fp32: a prompt of 300 tokens is more than our kernels take, so its weights are expanded."""
    expected = [one.tokens for one in ask(engine_on("cpu", kind), PROMPTS, sampling=sampling, new=60)]
    engine = engine_on("cuda", kind)
    for method in METHODS:
        found = [one.tokens for one in ask(engine, PROMPTS, method, sampling, new=60)]
        assert found == expected, method.name
    assert engine.statistics.num_captures > 0


@pytest.mark.parametrize("kind", KINDS)
def test_exact_rounds_say_the_same_by_every_method(kind: str) -> None:
    target = rounded_target(kind, "cuda", torch.bfloat16)
    draft = tiny_draft(target).to(torch.bfloat16)
    sizes = {"max_length": 256, "max_rows": 4, "num_pages": 12, "page_size": 128, "exact": True}
    engine = tiny_engine(target, draft, **sizes)
    together = [one.tokens for one in ask(engine, PROMPTS[:3], VANILLA, new=40)]
    for method in (Tree((3, 4, 2)), Seq(3), Lookup()):
        engine.forget()
        assert [one.tokens for one in ask(engine, PROMPTS[:3], method, new=40)] == together
    for index, prompt in enumerate(PROMPTS[:3]):
        engine.forget()
        assert ask(engine, [prompt], VANILLA, seed=index, new=40 - 3 * index)[0].tokens == together[index]


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_weights_are_smaller_and_told(
    kind: str, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(weights: str) -> tuple[LongSpec, int]:
        model = LongSpec.from_pretrained(
            tiny_folder, weights=weights, device="cuda", calibrate=False, max_rows=1, max_length=128
        )
        parts = (*model.target.blocks.parameters(), *model.target.blocks.buffers())
        return model, sum(part.nbytes for part in parts)

    (plain, plain_bytes), (model, num_bytes) = load("auto"), load(kind)
    assert isinstance(model.target.head, EightBitLinear)
    assert (plain.target.weights, model.target.weights) == ("bfloat16", kind)
    assert num_bytes < 0.75 * plain_bytes  # scales have a share in so small a model
    tokens = torch.randint(49152, (1, 500), generator=torch.Generator().manual_seed(0)).cuda()
    scores = []
    with torch.inference_mode():
        for target in (plain.target, model.target):
            pages = Pages.empty(target.config, 40, 16, target.device, target.kv_dtype)
            tables = torch.arange(1, 41, dtype=torch.int32, device="cuda")[None]
            target.attention = choose_backend("torch")
            zero = torch.zeros(1, dtype=torch.int64, device="cuda")
            scores.append(target.logits(pass_over(target, pages, tables, zero, tokens)))
    # In fp32 the same rounding of these random weights gives 0.07 and 0.29.
    most = {"int8": 0.1, "fp8": 0.35}[kind]
    assert 0 < (scores[0] - scores[1]).norm() / scores[0].norm() < most
    assert exit_code(["info", str(tiny_folder), "--weights", kind, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["weights"], facts["dtype"]) == (kind, "bfloat16")
