"""Whole decodes on the Triton backend: the tokens are those of the torch backend, whatever drafts."""

from __future__ import annotations

import torch

from longspec.attention import choose_backend
from longspec.decoding.accept import accept_coupled
from longspec.decoding.choose import Sampling
from longspec.decoding.device import RoundStore
from longspec.decoding.loop import Method, decode, start
from longspec.decoding.methods.magicdec import MagicDec
from longspec.decoding.methods.vanilla import Vanilla
from longspec.decoding.row import Row
from longspec.models.target import Transformer
from tests.decoding.scripted import SCRIPTS, ScriptedGlide, tiny_target

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(target: Transformer, method: Method) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    rows = [Row(torch.randint(40, (n,), generator=generator).tolist(), n, 12 - n // 4) for n in (3, 17)]
    state = start(target, target.new_cache(2, 40 + method.num_nodes), rows, Sampling(0.9, top_p=0.95))
    for _ in decode(state, method, accept_coupled, chunk=8):
        pass
    return [row.tokens for row in rows]


def test_methods_say_on_triton_what_vanilla_says_on_torch() -> None:
    target = tiny_target(3, vocab_size=40).to(DEVICE)
    target.attention = choose_backend("torch")
    expected = run(target, Vanilla())
    target.attention = choose_backend("triton")
    scripted = ScriptedGlide(target, expected, SCRIPTS["half"], (2, 3, 2))
    scripted._draft.to(DEVICE)
    methods: list[Method] = [Vanilla(), MagicDec(3, sinks=2, window=6, draws=False), scripted]
    for method in methods:
        assert run(target, method) == expected, method.name


def test_rounds_without_the_host_say_on_triton_what_vanilla_says_on_torch() -> None:
    """At batch 1 and sampled, where a row's one seed stands for all of its nodes."""
    sampling = Sampling(0.8, top_p=0.9)
    target = tiny_target(3, vocab_size=40).to(DEVICE)
    # It drafts with all of the context in sight: what it drafts is right, and every node counts.
    magicdec = MagicDec(3, sinks=0, window=64, draws=False)
    rows = []
    for backend, method, rounds in (("torch", Vanilla(), None), ("triton", magicdec, RoundStore())):
        target.attention = choose_backend(backend)
        rows.append(Row([3, 1, 4, 1, 5], 7, 10))
        state = start(target, target.new_cache(1, 32), rows[-1:], sampling)
        for _ in decode(state, method, accept_coupled, rounds=rounds):
            pass
    assert rows[0].tokens == rows[1].tokens
    assert rows[1].num_rounds == 3
