"""KV in fp8 on a GPU: long prompts, captured and exact rounds, real weights, and half the memory."""

from __future__ import annotations

import json

import pytest
import torch

from longspec import LongSpec
from longspec.attention import AttentionPlan, choose_backend
from longspec.cache import Pages
from longspec.decoding.methods import VANILLA, Lookup, MagicDec, Seq, Tree
from longspec.engine.engine import Engine
from longspec.models.weights import Precision
from tests.cli.run import exit_code
from tests.decoding.scripted import ask, pass_over, tiny_draft, tiny_engine, tiny_target
from tests.kernels.paged import FP8, HAS_FP8, ON_GPU

pytestmark = [
    pytest.mark.skipif(not ON_GPU, reason="needs a GPU"),
    pytest.mark.skipif(not HAS_FP8, reason="needs fp8"),
]
METHODS = (
    Seq(gamma=4),
    Tree((4, 8, 8), max_nodes=16),
    Tree((4, 8, 8), max_nodes=16, num_lookup=6),
    MagicDec(3, sinks=2, window=6),
    Lookup(4),
)
# The last is more than one chunk.
PROMPTS = [[(7 * place * place + 3) % 40 for place in range(length)] for length in (17, 3, 40, 5000)]


def engine_of(dtype: torch.dtype, exact: bool) -> Engine:
    shape = {"vocab_size": 40, "num_layers": 3, "hidden_size": 64, "head_dim": 32, "max_length": 8192}
    target = tiny_target(3, **shape).to("cuda", dtype)
    target.attention = choose_backend("triton")
    target.precision = Precision(dtype, kv_name="fp8")
    sizes = {"max_length": 6000, "max_rows": 4, "num_pages": 120, "page_size": 128}
    engine = tiny_engine(target, tiny_draft(target).to(dtype), exact=exact, **sizes)
    assert engine.models.fused
    assert engine.models.pages.keys.dtype == FP8
    return engine


@pytest.mark.parametrize(("dtype", "exact"), [(torch.bfloat16, True), (torch.float32, False)], ids=str)
def test_captured_rounds_say_what_vanilla_says(dtype: torch.dtype, exact: bool) -> None:
    """Together and alone: with exact rounds always, in fp32 but for ties."""
    engine = engine_of(dtype, exact)
    prompts = PROMPTS if exact else PROMPTS[:3]
    together = [one.tokens for one in ask(engine, prompts, VANILLA, new=40)]
    for method in METHODS:
        engine.forget()
        assert [one.tokens for one in ask(engine, prompts, method, new=40)] == together, method.label
    for index, prompt in enumerate(prompts):
        engine.forget()
        assert ask(engine, [prompt], VANILLA, seed=index, new=40 - 3 * index)[0].tokens == together[index]
    assert engine.statistics.num_captures > 0


@torch.inference_mode()
def test_a_chunk_of_a_prompt_attends_to_the_same_numbers() -> None:
    """By cuDNN, over parts that are expanded one after the other: the same calls, so the same bits."""
    T, length, page, K, D = 2500, 40000, 128, 2, 128
    tables = torch.arange(1, 340, dtype=torch.int32, device="cuda")[None]
    k, v = (torch.randn(K, 340 * page, D, device="cuda").to(FP8) for _ in range(2))
    q = torch.randn(1, T, 4 * K, D, device="cuda", dtype=torch.bfloat16)
    known = ([length], [tables[0].tolist()])
    plan = AttentionPlan(torch.tensor([length], device="cuda"), tables, page, T, known=known)
    backend = choose_backend("triton")
    found, expected = backend.attend(q, k, v, plan), backend.attend(q, k.to(q.dtype), v.to(q.dtype), plan)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_real_weights_in_half_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    def load(kv_dtype: str) -> LongSpec:
        return LongSpec.from_pretrained(
            device="cuda", kv_dtype=kv_dtype, kv_memory=2**28, max_rows=64, exact=True, calibrate=False
        )

    plain, model = load("auto"), load("fp8")
    pages = [one.engine.models.pages for one in (plain, model)]
    assert pages[1].num_pages == 2 * pages[0].num_pages
    assert pages[1].num_bytes < 2**28 + 2**22  # and the dump page
    prompts = ["Why is the sky blue?", "Say three times: red lorry, yellow lorry.", "def add(a, b):"]
    told = model.generate(prompts, method="vanilla", max_new_tokens=64)
    assert {one.kv_dtype for one in told} == {"fp8"}
    for method in ("tree", "seq", "lookup"):
        model.reset()
        found = model.generate(prompts, method=method, max_new_tokens=64)
        assert [one.text for one in found] == [one.text for one in told], method
    tokens = torch.randint(49152, (1, 500), generator=torch.Generator().manual_seed(0)).cuda()
    tables = torch.arange(1, 5, dtype=torch.int32, device="cuda")[None]
    zero = torch.zeros(1, dtype=torch.int64, device="cuda")
    scores = []
    with torch.inference_mode():
        for kind in (torch.bfloat16, FP8):
            target = model.target
            kept = Pages.empty(target.config, 4, 128, target.device, kind)
            scores.append(target.logits(pass_over(target, kept, tables, zero, tokens, None, True)))
    assert 0 < (scores[0] - scores[1]).norm() / scores[0].norm() < 0.2
    facts = []
    for kv_dtype in ("auto", "fp8"):
        assert exit_code(["info", "--kv-dtype", kv_dtype, "--json"]) == 0
        facts.append(json.loads(capsys.readouterr().out))
    assert [one["kv_dtype"] for one in facts] == ["bfloat16", "fp8"]
    assert facts[0]["kv_bytes_per_token"] == 2 * facts[1]["kv_bytes_per_token"]
