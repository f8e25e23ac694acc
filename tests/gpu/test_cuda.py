"""What must hold on a GPU: the same noise, and methods by torch's attention that say what the CPU says."""

from __future__ import annotations

import pytest
import torch

from longspec.attention import choose_backend
from longspec.decoding.choose import SamplingRows, choose, gumbel, hash_bits
from longspec.decoding.methods import VANILLA, Lookup, MagicDec, Seq, Tree
from longspec.decoding.sampling import Sampling
from tests.decoding.scripted import (
    SCRIPTS,
    ScriptedTree,
    answers_of,
    ask,
    tiny_draft,
    tiny_engine,
    tiny_target,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda")
PROMPTS = [[7 * place % 40 for place in range(length)] for length in (3, 40, 17)]


def test_noise_is_the_same_as_on_the_cpu() -> None:
    seeds, positions = torch.arange(64) * 7919, torch.arange(64) * 3
    tokens = torch.arange(5000)
    on_cpu = hash_bits(seeds[:, None], positions[:, None], tokens)
    on_gpu = hash_bits(seeds[:, None].to(GPU), positions[:, None].to(GPU), tokens.to(GPU))
    assert torch.equal(on_cpu, on_gpu.cpu())
    noise = gumbel(seeds.to(GPU), positions.to(GPU), tokens.to(GPU)).cpu()
    torch.testing.assert_close(noise, gumbel(seeds, positions, tokens), atol=1e-12, rtol=1e-12)
    logits = 3 * torch.randn(64, 5000)
    for sampling in (Sampling(), Sampling(0.8, top_p=0.9), Sampling(1.2, top_k=50, min_p=0.01)):
        here, there = (
            choose(
                logits.to(device),
                SamplingRows.of([sampling] * 64, 5000, device),
                seeds.to(device),
                positions.to(device),
                not sampling.greedy,
            )
            for device in (torch.device("cpu"), GPU)
        )
        assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_are_fp32(dtype: torch.dtype) -> None:
    target = tiny_target(3, hidden_size=64, vocab_size=1000).to(device=GPU, dtype=dtype)
    for shape in ((1, 64), (3, 64), (2, 7, 64)):
        hidden = torch.randn(shape, device=GPU).to(dtype)
        with torch.inference_mode():
            logits = target.logits(hidden)
        exact = hidden.double() @ target.head.weight.double().T
        torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.9, repetition_penalty=1.1)], ids=str)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_the_plain_engine_says_what_the_cpu_says(backend: str, sampling: Sampling) -> None:
    shape = {"vocab_size": 40, "num_layers": 3, "hidden_size": 64, "head_dim": 32}
    target = tiny_target(3, **shape)
    target.attention = choose_backend("torch")
    expected = [one.tokens for one in ask(tiny_engine(target), PROMPTS, sampling=sampling, new=40)]
    target = target.to(GPU)
    target.attention = choose_backend(backend)
    draft = tiny_draft(target)
    engine = tiny_engine(target, draft)
    assert not engine.models.fused
    methods = [
        VANILLA,
        Seq(),
        Tree(tree_shape=(4, 16, 16), max_nodes=20),
        MagicDec(sinks=2, window=6),
        Lookup(max_ngram=2),
    ]
    for options in methods:
        found = ask(engine, PROMPTS, options, sampling, new=40)
        assert [one.tokens for one in found] == expected, options.name
    for name, script in SCRIPTS.items():
        options = ScriptedTree((3, 4, 2), answers=answers_of(found), script=script)
        assert [one.tokens for one in ask(engine, PROMPTS, options, sampling, new=40)] == expected, name
