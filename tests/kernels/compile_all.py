"""Compiles every kernel for a Hopper GPU, as SmolLM2 in bf16 calls them; no GPU is needed, nothing is run.
Then whole rounds are compiled ahead, as before a capture, which must launch nothing and change nothing, of a
tree or, with the argument `all`, of every method; and some kernels for an older GPU.

A program of its own, because the tests run the kernels in Triton's interpreter, which compiles nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from longspec.attention.triton_backend import TritonAttention
from longspec.cache import Pages
from longspec.decoding.methods import VANILLA, Lookup, MagicDec, Method, Seq, Tree
from longspec.decoding.round import Models, run_round
from longspec.engine.device import Device
from longspec.engine.fill import read_into_rings, take_segments
from longspec.kernels import attention, eight_bit, launch, linear, planes, widen
from longspec.kernels.attention import attend
from longspec.kernels.choose import choose_tokens
from longspec.kernels.commit import commit_path
from longspec.kernels.embed import embed, embed_level
from longspec.kernels.exact import attend_exactly, chain_paths
from longspec.kernels.expand import expand
from longspec.kernels.linear import few_rows
from longspec.kernels.lookup import graft_lookup
from longspec.kernels.masked import Nodes, masked
from longspec.kernels.merge import merge
from longspec.kernels.noise import gumbel_noise
from longspec.kernels.norm import Residual, add_rms_norm, rms_norm
from longspec.kernels.rope import rope_write
from longspec.kernels.settle import settle_round
from longspec.kernels.silu import silu_mul
from longspec.kernels.topk import best_children
from longspec.kernels.tree import claim_newest, prune, segment_places, tree_sees
from longspec.models.draft import DraftHead
from tests.decoding.scripted import tiny_draft, tiny_target

PAGE = 128
TREE = Tree(tree_shape=(4, 40), max_nodes=16, num_lookup=6)
METHODS = (VANILLA, Seq(gamma=2), TREE, MagicDec(gamma=2, sinks=2, window=6), Lookup(gamma=3))


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
    for module in (launch, widen):
        vars(module)["is_hopper"] = lambda device: True
    vars(eight_bit)["has_dp4a"] = lambda device: True
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


def numbers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def halves(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def some_tables(num_rows: int) -> Tensor:
    """Tables of 8 pages, of larger ones."""
    return torch.zeros(num_rows, 10, dtype=torch.int32)[:, :8]


def call_attention(kind: torch.dtype, T: int, H: int = 9, K: int = 3, D: int = 64, S: int = 1024) -> None:
    """What a tree of T nodes calls to write and to read keys and values of this type."""
    q, k, lengths, tables = halves(1, T, H, D), torch.zeros(K, S, D, dtype=kind), numbers(1), some_tables(1)
    attend(q, k, k, lengths, tables, PAGE, torch.ones(1, T, T, dtype=torch.bool))
    attend(q[:, :1].contiguous(), k, k, lengths, tables, PAGE)
    attend(q, k, k, lengths, tables, PAGE, None, False, 4, 256)
    layers = torch.zeros(5, K, S, D, dtype=kind)[::2]
    attend(halves(1, T, 3 * H, D), layers, layers, lengths, tables, PAGE, None, False)
    attend_exactly(q, k, k, lengths, tables, PAGE, chain_paths(numbers(1, T)))
    qkv, table, places = halves(1, T, (H + 2 * K) * D), torch.zeros(2, S, D), numbers(1, T)
    rope_write(qkv, table, places, places, k, k)
    rope_write(qkv, table, places, places, k[None], k[None], (halves(D), halves(D), 1e-6))
    pages = torch.zeros(2, 3, 1024, 64, dtype=kind)
    commit_path(pages, pages, lengths, tables, PAGE, numbers(1, 6), lengths)


def call_models(T: int, E: int = 576) -> None:
    """What else target and draft call for a tree of T nodes."""
    x, weight = halves(1, T, E), halves(E)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-5)
    silu_mul(halves(1, T, 3072))
    part = (halves(T, 9, 64), torch.empty(T, 9, device=halves(1).device))
    merge(part, part)
    call_products(T, E)


def call_prefill(n: int = 4, T: int = 64, H: int = 9, K: int = 3, D: int = 64, S: int = 1024) -> None:
    """What prefill in n segments of T tokens calls."""
    q, k, tables, text = halves(n, T, H, D), halves(K, S, D), some_tables(n), numbers(n, S)
    segment_places(numbers(n), numbers(n), numbers(n), tables, text, PAGE, T)
    attend(q, k, k, numbers(n), tables, PAGE)


def call_products(T: int, E: int = 576) -> None:
    """Products of T rows, and of one."""
    x, weight = halves(1, T, E), halves(E)
    norm, lone = (weight, 1e-5), Residual(x[:, :1])
    few_rows(Residual(x, x), halves(960, E), halves(960), norm)
    few_rows(Residual(x, x), halves(3072, E), None, norm, gated=True)
    few_rows(lone, halves(3072, E), None, norm, gated=True)
    few_rows(Residual(lone.x, lone.x), halves(960, E), None, norm)
    few_rows(Residual(halves(1, 1, 1536)), halves(E, 1536), residual=lone.x)
    few_rows(Residual(halves(1, T, 1536)), halves(E, 1536), residual=x)
    ahead, _ = few_rows(Residual(halves(1, T, 1536)), halves(E, 1536), residual=x, factor=weight)
    few_rows(ahead, halves(960, E), halves(960), norm)
    few_rows(ahead, halves(3072, E), None, norm, gated=True)
    few_rows(Residual(halves(1, T, 4096)), halves(4096, 4096))
    few_rows(Residual(halves(1, T, 4096)), halves(28672, 4096), gated=True)


def call_products_of_bytes(kind: torch.dtype) -> None:
    """Products of Llama-3-8B with weights of 8 bits, and with a scale for every 128 of them."""
    for num_in, num_out, num_runs in ((4096, 28672, 1), (14336, 4096, 1), (14336, 4096, 112)):
        weight, norm = torch.zeros(num_out, num_in, dtype=kind), (halves(num_in), 1e-5)
        scales = torch.zeros(num_out, num_runs)
        expand(weight, scales, torch.bfloat16)
        for num_rows in (1, 16, 64, 256) if kind == torch.int8 else (1, 64):
            x = Residual(halves(1, num_rows, num_in))
            if num_out == 28672:
                few_rows(x, weight, halves(num_out), norm, gated=True, scales=scales)
            else:
                few_rows(x, weight, residual=halves(1, num_rows, num_out), scales=scales)
    few_rows(x, weight, dtype=torch.float32, scales=scales, exact=True)


class Rows(NamedTuple):
    """What choosing and settling want to know of rows."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    seen: Tensor | None
    lengths: Tensor
    limits: Tensor
    eos_ids: Tensor
    running: Tensor
    active: Tensor
    num_unread: Tensor
    report: Tensor
    feature: Tensor
    text: Tensor


def some_rows(B: int, V: int, width: int, marked: bool) -> Rows:
    flags, seen = torch.zeros(2, B, dtype=torch.bool), torch.zeros(B, V, dtype=torch.bool) if marked else None
    return Rows(
        *(torch.zeros(B), numbers(B), torch.zeros(B), torch.zeros(B), torch.zeros(B), seen),
        *(numbers(B), numbers(B), numbers(B, 4), flags[0], flags[1], numbers(B)),
        *(numbers(B, width + 1), halves(B, 576), numbers(B, 1024)),
    )


def call_choices(N: int, V: int, seeds: Tensor, nodes: Tensor) -> None:
    """Greedy and sampled choices at N nodes, with and without a penalty."""
    logits, positions = torch.zeros(N, V), numbers(N)
    for marked in (False, True):
        rows = some_rows(1, V, 6, marked)
        choose_tokens(logits, rows, seeds, positions, True, 1, (nodes, nodes, 5))
        settle_round(nodes, nodes, nodes, halves(1, N, 576), rows, 6)
    choose_tokens(logits, rows, seeds, positions, True)
    choose_tokens(logits, rows, seeds, positions, False)


def call_rounds(N: int, V: int = 49152, window: int = 512) -> None:
    """What a round of N nodes calls around them."""
    lengths, parents, logits, tables = numbers(1), numbers(1, N), torch.zeros(N, V), some_tables(1)
    call_choices(N, V, lengths, parents)
    tree = (numbers(1, 80), numbers(1, 80), torch.zeros(1, 80))
    best_children(logits[None], tree, range(0, N), 16)
    noise = gumbel_noise(numbers(1), numbers(1), torch.arange(V), torch.zeros(1), 1, 5)
    best_children(logits[None], tree, range(5, 5 + N), 16, torch.zeros(1), noise[0], torch.arange(V))
    embed(parents, halves(V, 576))
    embed(parents, halves(V, 576), halves(1, 1, 576), halves(576))
    tree_sees(parents, 5, lengths, tables, PAGE)
    level = (lengths, 2, window + 1)
    embed_level(parents, halves(V, 576), halves(1, 1, 576), halves(576), level)
    embed_level(
        parents, halves(V, 576), halves(1, 1, 576), halves(576), level, (parents, 1, halves(1, N, 576))
    )
    ring, held = halves(1, 3, window + N + 1, 64), numbers(1, window + N + 1)
    masked(halves(1, 8, 9, 64), ring, ring, Nodes(held, window, lengths, parents, 1, 2))
    masked(halves(1, 1, 1, 64), ring[:, :1], ring[:, :1], Nodes(held, window, lengths, parents, 0, 0))
    text = numbers(1, 1024)
    claim_newest(text, lengths, lengths, held, window, tree, 6)
    graft_lookup(tree, 68, text, numbers(1), lengths, (2, 8, 2.3, 0.45))
    graft_lookup(tree, 1, text, numbers(1), lengths, (2, 8, 2.3, 0.45))
    prune(parents, parents, torch.zeros(1, N), N // 2)


def check_ahead(work: Callable[[], object], held: list[Tensor], names: Called) -> None:
    """What `capture` does first: kernels are compiled, none is launched, and nothing that is held changes.
    What it does then needs no other kernel."""
    num_launched, num_asked = len(names[False]), len(names[True])
    before = [tensor.clone() for tensor in held]
    launch.compile_for([work])
    assert len(names[False]) == num_launched
    assert len(names[True]) > num_asked
    assert all(torch.equal(one, other) for one, other in zip(before, held, strict=True))
    names[None].clear()
    work()
    assert len(names[False]) > num_launched
    assert not names[None], names[None]


class AnywhereAttention(TritonAttention):
    """Tensors that no GPU holds are the kernels' business too: nothing is run."""

    def can_fuse(self, x: Tensor, head_dim: int) -> bool:
        return True


def check_rounds_ahead(names: Called, methods: Sequence[Method]) -> None:
    """Rounds of these methods, a pass over segments of prompts, and one that has the draft read texts."""
    target = tiny_target(3, vocab_size=40, num_layers=3, hidden_size=64, head_dim=32).bfloat16()
    target.attention = AnywhereAttention()
    draft = tiny_draft(target).bfloat16()
    # What a kernel should have written is then the largest integer, which no table has an entry for.
    torch.use_deterministic_algorithms(True)
    pages = Pages.empty(target.config, 4, PAGE, target.device, target.dtype)
    models = Models(target, pages, True, draft, DraftHead(target, None))
    device = Device(models, 2, 128, 64)
    rows = device.slots.first(2)
    parts = [getattr(rows, field.name) for field in fields(rows)]
    held = [pages.keys, pages.values, *(part for part in parts if isinstance(part, Tensor))]
    rows.lengths.fill_(3)
    with torch.inference_mode():
        for sampled in (False, True) if len(methods) > 1 else (True,):
            for asked in methods:
                for method in {asked.fit(models), asked.fit(models, draws=sampled)}:
                    check_ahead(partial(run_round, models, rows, method, sampled), held, names)
            work = device._describe([], 4)
            check_ahead(partial(take_segments, models, device.slots, work, sampled), held, names)
        models.exact = True
        for asked in (VANILLA, Tree()) if len(methods) > 1 else methods:
            check_ahead(partial(run_round, models, rows, asked.fit(models), False), held, names)
        check_ahead(partial(take_segments, models, device.slots, work, False), held, names)
        goals = torch.tensor([device.max_rows] * 2)
        check_ahead(partial(read_into_rings, models, device.slots, goals), held, names)


def check_ampere() -> None:
    """Before Hopper no hardware copies tiles; what does it must be copies of many numbers at a time."""
    driver.set_active(Ampere())
    for module in (launch, widen):
        vars(module)["is_hopper"] = lambda device: False
    for module in (attention, linear, planes):
        vars(module)["copies_tiles"] = lambda device: False
    run = JITFunction.run

    def checked(self: Any, *args: Any, **options: Any) -> Any:
        kernel = run(self, *args, **options)
        if self.fn.__name__ not in ("_merge_kernel", "planes_kernel"):
            assert "cp.async" in kernel.asm["ptx"], self.fn.__name__
            assert "ld.global.b16" not in kernel.asm["ptx"], self.fn.__name__
        return kernel

    JITFunction.run = checked
    k, sees = halves(3, 1024, 64), torch.ones(1, 64, 64, dtype=torch.bool)
    attend(halves(1, 64, 9, 64), k, k, numbers(1), some_tables(1), PAGE, sees)
    for num_rows in (16, 32, 64):
        rows = Residual(halves(1, num_rows, 1536))
        few_rows(rows, halves(576, 1536))
        few_rows(rows, torch.zeros(576, 1536, dtype=torch.int8), scales=torch.zeros(576, 1))


if __name__ == "__main__":
    names = compile_only()
    for kind in (torch.bfloat16, torch.float8_e4m3fn):
        call_attention(kind, 16)
    # A tile of as many rows as a round of an 8B model has.
    call_attention(torch.float8_e4m3fn, 64, 32, 8, 128)
    call_models(16)
    call_prefill()
    call_products(64)
    for kind in (torch.int8, torch.float8_e4m3fn):
        call_products_of_bytes(kind)
    call_rounds(16)
    check_rounds_ahead(names, METHODS if "all" in sys.argv else (TREE,))
    check_ampere()
    print("\n".join(sorted(set(names[False]))))
