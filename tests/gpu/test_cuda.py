"""What must hold on a GPU: the same noise, right attention, and methods that say what vanilla says."""

from __future__ import annotations

import pytest
import torch

from longspec.api import prepare_draft
from longspec.attention import choose_backend
from longspec.attention.reference import ReferenceAttention
from longspec.config import DraftConfig
from longspec.decoding.accept import accept_coupled
from longspec.decoding.choose import Sampling, choose, gumbel, hash_bits
from longspec.decoding.device import RoundStore
from longspec.decoding.guard import Guarded, Prices
from longspec.decoding.loop import Method, Rounds, decode, start
from longspec.decoding.methods.lookup import Lookup
from longspec.decoding.methods.magicdec import MagicDec
from longspec.decoding.methods.make import MethodOptions, make_method
from longspec.decoding.methods.vanilla import Vanilla
from longspec.decoding.row import Row
from longspec.models.draft import GlideDraft
from longspec.models.target import Transformer
from tests.decoding.scripted import SCRIPTS, ScriptedGlide, tiny_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda")
SHAPES = [
    (1, 1, 3, 3, 64, [0]),
    (1, 1, 1, 7, 96, [513]),
    (1, 200, 2, 5, 32, [0]),
    (3, 1, 2, 1, 64, [0, 1, 77]),
    (2, 65, 1, 8, 128, [131, 7]),
    (3, 17, 3, 3, 64, [64, 0, 200]),
    (1, 300, 2, 4, 256, [700]),
]


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
        here = choose(logits, sampling, seeds, positions)
        assert torch.equal(choose(logits.to(GPU), sampling, seeds.to(GPU), positions.to(GPU)).cpu(), here)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["chain", "tree", "window"])
def test_attention_matches_fp64(
    shape: tuple[int, int, int, int, int, list[int]], dtype: torch.dtype, kind: str
) -> None:
    B, T, K, G, D, lengths = shape
    torch.manual_seed(T)
    S = max(lengths) + T + 3
    q = torch.randn(B, T, K * G, D, device=GPU).to(dtype)
    k, v = (torch.randn(B, K, S, D, device=GPU).to(dtype) for _ in range(2))
    tree = None
    if kind == "tree":
        tree = torch.eye(T, dtype=torch.bool)
        for node in range(1, T):
            tree[node] |= tree[int(torch.randint(node, ()))]
        tree = tree.to(GPU)
    window = (2, 50) if kind == "window" else (0, None)
    backend, exact = choose_backend("torch"), ReferenceAttention(torch.float64)
    plan = backend.plan(torch.tensor(lengths, device=GPU), T, tree, *window)
    tolerance = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    sees = torch.rand(B, T, S, device=GPU) < 0.5
    sees[:, :, 0] = True
    for method, what in (("attend", plan), ("prefix", plan), ("masked", sees)):
        out, lse = getattr(backend, method)(q, k, v, what)
        true_out, true_lse = getattr(exact, method)(q.double(), k.double(), v.double(), what)
        torch.testing.assert_close(out.double(), true_out, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse, true_lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_are_fp32(dtype: torch.dtype) -> None:
    target = tiny_target(3, hidden_size=64, vocab_size=1000).to(device=GPU, dtype=dtype)
    for shape in ((1, 64), (3, 64), (2, 7, 64)):
        hidden = torch.randn(shape, device=GPU).to(dtype)
        with torch.inference_mode():
            logits = target.logits(hidden)
        exact = hidden.double() @ target.head.weight.double().T
        torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)


def run(
    target: Transformer, sampling: Sampling, method: Method, rounds: Rounds | None = None
) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(40, (n,), generator=generator).tolist() for n in (3, 40, 17)]
    rows = [Row(prompt, 5 + index, 40 - 4 * index) for index, prompt in enumerate(prompts)]
    state = start(target, target.new_cache(3, 100 + method.num_nodes), rows, sampling)
    for _ in decode(state, method, accept_coupled, chunk=16, rounds=rounds):
        pass
    return [row.tokens for row in rows]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.9, repetition_penalty=1.1)], ids=str)
def test_methods_say_what_vanilla_says_and_what_the_cpu_says(sampling: Sampling) -> None:
    shape = {"vocab_size": 40, "num_layers": 3, "hidden_size": 64, "head_dim": 32}
    target = tiny_target(3, **shape)
    expected = run(target, sampling, Vanilla())
    target = target.to(GPU)
    assert run(target, sampling, Vanilla()) == expected
    draft = GlideDraft(target.config, DraftConfig(window=8, cross_layers=(0, -1), use_feature=True))
    draft.initialise(torch.Generator().manual_seed(2))
    drafting = prepare_draft(draft.to(GPU), target)
    methods: list[Method] = [
        make_method(MethodOptions("seq"), sampling, drafting)[0],
        make_method(MethodOptions("tree", max_nodes=20), sampling, drafting)[0],
        MagicDec(4, sinks=2, window=6, draws=False),
        Lookup(4, max_ngram=2, min_ngram=1),
    ]
    for method in methods:
        assert run(target, sampling, method) == expected, method.name


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripted_drafts_on_the_gpu(script: str) -> None:
    target = tiny_target(3, vocab_size=40)
    expected = run(target, Sampling(), Vanilla())
    method = ScriptedGlide(target.to(GPU), expected, SCRIPTS[script], (3, 4, 2))
    method._draft.to(GPU)
    assert run(target, Sampling(), method) == expected


@pytest.mark.parametrize("cost", [1.0, 1.4, 3.0])
def test_replayed_rounds_that_are_guarded(cost: float) -> None:
    """Free, they never rest; dear ones of a random draft mostly do, and go on between."""
    shape = {"vocab_size": 40, "num_layers": 3, "hidden_size": 64, "head_dim": 32}
    target = tiny_target(3, **shape).to(GPU)
    expected = run(target, Sampling(), Vanilla())
    draft = GlideDraft(target.config, DraftConfig(window=8, use_feature=True))
    draft.initialise(torch.Generator().manual_seed(2))
    drafting = prepare_draft(draft.to(GPU), target)
    target.attention = choose_backend("triton")
    method = make_method(MethodOptions("tree", tree_shape=(2, 3, 3)), Sampling(), drafting)[0]
    guarded = Guarded(method, Prices(((method.num_nodes, cost),)))
    assert run(target, Sampling(), guarded, RoundStore()) == expected
