"""Compiles every kernel for a Hopper GPU, as SmolLM2 in bf16 calls them; no GPU is needed, nothing is run.
Then whole rounds are compiled ahead, as before a capture, which must launch nothing and change nothing; and
some kernels for an older GPU.

A program of its own, for the tests run the kernels in Triton's interpreter, which compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from longspec.attention import choose_backend, triton_backend
from longspec.config import DraftConfig
from longspec.data.writer import Writer
from longspec.decoding.choose import Sampling
from longspec.decoding.copied import DOUBT, FADE, LEAST, MOST
from longspec.decoding.device import DeviceRounds, device_round
from longspec.decoding.fill import Filler
from longspec.decoding.guard import Resting
from longspec.decoding.loop import start
from longspec.decoding.methods.make import MethodOptions, make_method
from longspec.decoding.row import Row
from longspec.kernels import attention, launch, linear
from longspec.kernels.attention import attend
from longspec.kernels.choose import choose_tokens
from longspec.kernels.commit import commit_path
from longspec.kernels.copied import graft_copied
from longspec.kernels.draw import draw_tokens
from longspec.kernels.embed import embed, embed_level
from longspec.kernels.linear import few_rows
from longspec.kernels.masked import Nodes, masked
from longspec.kernels.noise import gumbel_noise
from longspec.kernels.norm import Stream, add_rms_norm, rms_norm
from longspec.kernels.rope import rope_write
from longspec.kernels.settle import settle_round
from longspec.kernels.silu import silu_mul
from longspec.kernels.topk import best_children
from longspec.kernels.tree import claim_newest, prune, tree_sees
from longspec.models.draft import DraftHead, GlideDraft
from tests.decoding.scripted import tiny_target

SAMPLINGS = (Sampling(), Sampling(0.8, top_p=0.9))
METHODS = (
    MethodOptions("vanilla"),
    MethodOptions("seq", gamma=2),
    MethodOptions("tree", tree_shape=(4, 40), max_nodes=16, num_copied=6),
    MethodOptions("magicdec", gamma=2, sinks=2, window=6),
)


class Hopper:
    """What the compiler asks of a driver."""

    class utils:
        """What the tiling asks."""

        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"multiprocessor_count": 132, "max_shared_mem": 232448}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Ampere(Hopper):
    """An older one."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)


Called = dict[bool | None, list[str]]
"""The names of kernels: to be launched (False), to be compiled (True), and compiled (None) by such calls."""


def compile_only() -> Called:
    """Make calls of kernels compile them and stop there; returns the names of all that are called from now
    on."""
    driver.set_active(Hopper())
    vars(launch)["is_hopper"] = lambda device: True
    triton_backend._reaches = lambda x: True
    names: Called = {False: [], True: [], None: []}
    run, compile_one = JITFunction.run, JITFunction._do_compile

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        names[warmup].append(self.fn.__qualname__ + " of " + self.fn.__module__)
        return run(self, *args, grid=grid, warmup=True, **options)

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        names[None].append(self.fn.__qualname__)
        return compile_one(self, *args, **options)

    JITFunction.run, JITFunction._do_compile = compiled, noted
    return names


def numbers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def call_models(T: int, H: int = 9, K: int = 3, D: int = 64, S: int = 1024, E: int = 576) -> None:
    """What target and draft call for a tree of T nodes."""
    q, k, lengths = halves(1, T, H, D), halves(1, K, S, D), numbers(1)
    attend(q, k, k, lengths, torch.ones(1, T, T, dtype=torch.bool))
    attend(q[:, :1].contiguous(), k, k, lengths)
    attend(q, k, k, lengths, None, False, 4, 256)
    attend(halves(1, T, 3 * H, D), halves(3, 1, K, S, D), halves(3, 1, K, S, D), lengths, None, False)
    masked(q, k, k, torch.ones(1, T, S, dtype=torch.bool))
    masked(q[:, :1, :1], k[:, :1], k[:, :1], torch.ones(1, 1, S, dtype=torch.bool))
    x, weight = halves(1, T, E), halves(E)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-5)
    qkv, table, places = halves(1, T, (H + 2 * K) * D), torch.zeros(2, S, D), numbers(1, T)
    rope_write(qkv, table, places, places, k, k)
    rope_write(qkv, table, places, places, k, k, (halves(D), halves(D), 1e-6))
    silu_mul(halves(1, T, 3072))
    call_products(T, E)


def call_products(T: int, E: int = 576) -> None:
    """Products of T rows, and of one."""
    x, weight = halves(1, T, E), halves(E)
    norm, lone = (weight, 1e-5), Stream(x[:, :1])
    few_rows(Stream(x, x), halves(960, E), halves(960), norm)
    few_rows(Stream(x, x), halves(3072, E), None, norm, gated=True)
    few_rows(lone, halves(3072, E), None, norm, gated=True)
    few_rows(Stream(lone.x, lone.x), halves(960, E), None, norm)
    few_rows(Stream(halves(1, 1, 1536)), halves(E, 1536), residual=lone.x)
    few_rows(Stream(halves(1, T, 1536)), halves(E, 1536), residual=x)
    ahead, _ = few_rows(Stream(halves(1, T, 1536)), halves(E, 1536), residual=x, factor=weight)
    few_rows(ahead, halves(960, E), halves(960), norm)
    few_rows(ahead, halves(3072, E), None, norm, gated=True)
    few_rows(Stream(halves(1, T, 4096)), halves(4096, 4096))
    few_rows(Stream(halves(1, T, 4096)), halves(28672, 4096), gated=True)


def call_rounds(N: int, V: int = 49152, window: int = 512) -> None:
    """What a round of N nodes calls around them."""
    lengths, parents, logits = numbers(1), numbers(1, N), torch.zeros(N, V)
    choose_tokens(logits, numbers(N), numbers(N))
    seen = torch.zeros(N, V, dtype=torch.bool)
    choose_tokens(logits, numbers(N), numbers(N), 0.7, 20, 0.9, 0.1, 1.1, seen)
    tree = (numbers(1, 80), numbers(1, 80), torch.zeros(1, 80))
    best_children(logits[None], tree, range(0, N), 16)
    best_children(logits[None], tree, range(5, 5 + N), 16, 0.7, torch.zeros(1, V), torch.arange(V))
    gumbel_noise(numbers(N), numbers(N), torch.arange(V), 1, 5)
    draw_tokens(logits, torch.zeros(N), numbers(N), numbers(N))
    embed(parents, halves(V, 576))
    embed(parents, halves(V, 576), halves(1, 1, 576), halves(576))
    tree_sees(parents, 5, lengths)
    embed_level(parents, halves(V, 576), halves(1, 1, 576), halves(576), (lengths, 2, window + 1))
    ring, nodes = (
        halves(1, 3, window + N + 1, 64),
        Nodes(numbers(1, window + N + 1), window, lengths, parents, 1, 2),
    )
    masked(halves(1, 8, 9, 64), ring, ring, nodes)
    claim_newest(numbers(1, 6), lengths, lengths, numbers(1, window + N + 1), window, tree)
    text = numbers(1, 1025)
    claim_newest(numbers(1, 6), lengths, lengths, numbers(1, window + N + 1), window, tree, text)
    graft_copied(tree, 68, text, numbers(1), lengths, (LEAST, MOST, DOUBT, FADE))
    prune(parents, parents, torch.zeros(1, N), N // 2)
    running, emitted, report = torch.zeros(1, dtype=torch.bool), numbers(1, 6), numbers(1, 7)
    state = (running, emitted, numbers(1), report, halves(1, 576))
    settle_round(parents, parents, parents, halves(1, N, 576), lengths, lengths, numbers(2), *state)
    commit_path(halves(2, 1, 3, 64, 64), halves(2, 1, 3, 64, 64), lengths, numbers(1, 6), lengths)


def check_ahead(work: Callable[[], object], held: list[torch.Tensor], names: Called) -> None:
    """What `capture` does first: kernels are compiled, none is launched, and nothing that is held changes.
    What it does then needs no other kernel."""
    num_launched, num_asked = len(names[False]), len(names[True])
    before = [tensor.clone() for tensor in held]
    launch.compile_for(work)
    assert len(names[False]) == num_launched
    assert len(names[True]) > num_asked
    assert all(torch.equal(one, other) for one, other in zip(before, held, strict=True))
    names[None].clear()
    work()
    assert len(names[False]) > num_launched
    assert not names[None], names[None]


@torch.inference_mode()
def check_rounds_ahead(names: Called) -> None:
    """Rounds of every method and those between them, a pass over a prompt, and a step that writes text."""
    target = tiny_target(3, vocab_size=40, num_layers=3, hidden_size=64, head_dim=32).bfloat16()
    target.attention = choose_backend("triton")
    draft = GlideDraft(target.config, DraftConfig(window=8, cross_layers=(0, -1), use_feature=True))
    draft.initialise(torch.Generator().manual_seed(2), std=0.3)
    drafting = (draft.bfloat16(), DraftHead(target, None))
    # What a kernel should have written is then the largest integer, which no table has an entry for.
    torch.use_deterministic_algorithms(True)
    cache = target.new_cache(2, 128)
    for part in (cache.keys, cache.values):
        part.zero_()
    for sampling in SAMPLINGS:
        for options in METHODS:
            method, _ = make_method(options, sampling, drafting)
            state = start(target, cache, [Row([1, 2, 3], 0, 9)] * 2, sampling)
            cache.lengths.fill_(3)
            rounds = DeviceRounds(state, method)
            method.begin(rounds._state)
            rounds._board.running.zero_()
            held = [cache.keys, cache.values, cache.lengths, *vars(rounds._board).values()]
            held += [rounds._state.emitted, rounds._state.num_emitted, rounds._state.feature]
            for one in (method, Resting(method)):
                check_ahead(partial(device_round, rounds._state, one, rounds._board), held, names)
    filler = Filler(target, cache)
    check_ahead(filler._take, [cache.keys, cache.values, cache.lengths, filler._feature], names)
    writer = Writer(target, 4, 64, [0], fused=True)
    check_ahead(writer._step, [writer._tokens, writer._active, writer._cache.lengths], names)


def check_ampere() -> None:
    """Before Hopper no hardware copies tiles; what does it must be copies of many numbers at a time."""
    driver.set_active(Ampere())
    vars(launch)["is_hopper"] = lambda device: False
    for module in (attention, linear):
        vars(module)["copies_tiles"] = lambda device: False
    run = JITFunction.run

    def checked(self: Any, *args: Any, **options: Any) -> Any:
        kernel = run(self, *args, **options)
        if self.fn.__name__ != "_merge_kernel":
            assert "cp.async" in kernel.asm["ptx"], self.fn.__name__
            assert "ld.global.b16" not in kernel.asm["ptx"], self.fn.__name__
        return kernel

    JITFunction.run = checked
    k = halves(1, 3, 1024, 64)
    attend(halves(1, 64, 9, 64), k, k, numbers(1), torch.ones(1, 64, 64, dtype=torch.bool))
    for num_rows in (16, 32, 64):
        few_rows(Stream(halves(1, num_rows, 1536)), halves(576, 1536))


if __name__ == "__main__":
    names = compile_only()
    call_models(16)
    call_products(64)
    call_rounds(16)
    check_rounds_ahead(names)
    check_ampere()
    print("\n".join(sorted(set(names[False]))))
