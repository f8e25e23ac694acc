"""KV in fp8: kernels compute what they compute over the same numbers in a larger dtype, and every method says
what vanilla says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longspec import LongSpec
from longspec.attention import AttentionPlan, choose_backend
from longspec.cache import Pages
from longspec.cli.terminal import figures
from longspec.decoding.methods import VANILLA, Lookup, MagicDec, Method, Seq, Tree
from longspec.decoding.sampling import Sampling
from longspec.engine.engine import Engine
from longspec.engine.make import make_engine
from longspec.engine.memory import plan_decoding
from longspec.engine.sequence import Sequence
from longspec.kernels import attention, exact
from longspec.kernels.attention import attend
from longspec.kernels.commit import commit_path
from longspec.kernels.exact import attend_exactly, chain_paths
from longspec.kernels.rope import rope_write
from longspec.models.target import Transformer
from longspec.models.weights import Precision
from tests.cli.run import exit_code
from tests.decoding.scripted import tiny_draft, tiny_engine, tiny_target
from tests.kernels.fp8 import correct_rounding
from tests.kernels.paged import DEVICE, DTYPES, FP8, HAS_FP8, ON_GPU, places, random_tables
from tests.kernels.test_attention import random_tree

PAGE = 128
pytestmark = pytest.mark.skipif(not HAS_FP8, reason="needs fp8")


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    correct_rounding(monkeypatch)


def random_pages(shape: tuple[int, ...], held: Tensor, generator: torch.Generator) -> Tensor:
    """In fp8. Entries that are not held are nan, but those of page 0 are 0."""
    x = torch.full(shape, torch.nan, device=DEVICE)
    x[..., :PAGE, :] = 0
    x[..., held, :] = (4 * torch.randn(*shape[:-2], len(held), shape[-1], generator=generator)).to(DEVICE)
    return x.to(FP8)


def check_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """The same bits by the interpreter. The compiler may add the products of a key in another order."""
    bound = 0.0 if not ON_GPU else 2e-5 if found[0].dtype == torch.float32 else 2e-2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=bound, rtol=bound)
        assert not one.isnan().any()


@pytest.mark.parametrize(
    ("dtype", "boxes"), [*((dtype, True) for dtype in DTYPES), (torch.float16, False)], ids=str
)
def test_attention_is_that_over_the_same_numbers(
    dtype: torch.dtype, boxes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes that end in the middle of a tile, windows, trees, chains, and several layers at once."""
    if not boxes:
        for module in (attention, exact):
            monkeypatch.setattr(module, "copies_tiles", lambda device: False)
    generator = torch.Generator().manual_seed(0)
    K, G, D, T, lengths = 2, 2, 32, 5, [126, 0]
    ends = [length + T for length in lengths]
    tables, num_pages = random_tables(ends, PAGE, generator)
    held = torch.cat([places(tables, row, end, PAGE) for row, end in enumerate(ends)])
    layers = [random_pages((3, K, num_pages * PAGE, D), held, generator) for _ in range(2)]
    q = torch.randn(len(lengths), T, 3 * K * G, D, generator=generator).to(DEVICE, dtype)
    at, tree = torch.tensor(lengths, device=DEVICE), random_tree(T, generator).to(DEVICE)
    ours, given = q[:, :, : K * G], (at, tables, PAGE)
    calls: list[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = [
        lambda k, v: attend(q, k, v, *given, None, False),
        lambda k, v: attend(ours, k[1], v[1], *given, tree),
        lambda k, v: attend(ours, k[1], v[1], *given, None, True, 2, 50),
        lambda k, v: attend(ours[:, :1], k[2], v[2], *given),
        lambda k, v: attend_exactly(
            ours, k[0], v[0], *given, chain_paths(at[:, None] + torch.arange(T, device=DEVICE))
        ),
    ]
    for call in calls:
        check_same(call(layers[0], layers[1]), call(layers[0].to(dtype), layers[1].to(dtype)))


def test_torch_attends_to_the_same_numbers() -> None:
    """As for long prompts: pages in one run, and in several."""
    generator = torch.Generator().manual_seed(1)
    T, length, dtype = 70, 200, torch.float32
    backend = choose_backend("torch")
    for table in ([1, 2, 3], [3, 1, 2]):
        tables = torch.tensor([table], dtype=torch.int32, device=DEVICE)
        held = places(tables, 0, length + T, PAGE)
        k, v = (random_pages((2, 4 * PAGE, 32), held, generator) for _ in range(2))
        q = torch.randn(1, T, 4, 32, generator=generator).to(DEVICE, dtype)
        for num_new, tree in ((T, None), (5, random_tree(5, generator).to(DEVICE)), (1, None)):
            plan = AttentionPlan(torch.tensor([length], device=DEVICE), tables, PAGE, num_new, tree)
            for over in (backend.attend, backend.prefix):
                wide = (k.to(dtype), v.to(dtype))
                check_same(over(q[:, :num_new], k, v, plan), over(q[:, :num_new], *wide, plan))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_is_the_nearest_number_and_never_beyond_the_largest(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    B, T, H, K, D, S = 2, 3, 4, 2, 32, 64
    qkv = torch.randn(B, T, (H + 2 * K) * D, generator=generator) * torch.tensor([[1e-3], [1.0], [100.0]])
    values = qkv.unflatten(-1, (-1, D))[:, :, H + K :]
    values[0, 2, 0, :4] = torch.tensor([449.0, -6e4, torch.inf, -torch.inf])
    values[1, 1, 1, 7] = torch.nan
    qkv = qkv.to(DEVICE, dtype)
    angles = torch.rand(S, D // 2, generator=generator).repeat(1, 2)
    table = torch.stack((angles.cos(), angles.sin() * torch.tensor([-1.0, 1.0]).repeat_interleave(D // 2)))
    positions = torch.tensor([[0, 5, 9], [3, 4, 63]], device=DEVICE)
    goals = torch.tensor([[1, 9, 17], [40, 2, 33]], device=DEVICE)
    found = {}
    for kind in (dtype, FP8):
        pages = torch.zeros(2, K, S, D, device=DEVICE, dtype=kind)
        q = rope_write(qkv, table.to(DEVICE), positions, goals, pages[0], pages[1])
        found[kind] = (q, pages)
    assert torch.equal(found[FP8][0], found[dtype][0])
    wide = found[dtype][1].float()
    expected, kept = wide.clamp(-448, 448).to(FP8), found[FP8][1]
    assert torch.equal(kept.float().nan_to_num(-1), expected.float().nan_to_num(-1))
    assert wide[1].isinf().any()
    assert kept[1].float().isnan().sum() == 1
    assert kept[1, 0, 17, :4].tolist() == [448, -448, 448, -448]
    # An accepted path moves as it is.
    one = torch.tensor([1], device=DEVICE)
    tables = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32, device=DEVICE)
    moved = kept[:, None].clone()
    commit_path(moved[0], moved[1], one, tables, 16, torch.tensor([[8, 16]], device=DEVICE), 2 * one)
    bytes_of = [part.view(torch.uint8) for part in (moved[:, 0], kept)]
    assert torch.equal(bytes_of[0][:, :, [1, 2]], bytes_of[1][:, :, [9, 17]])
    assert torch.equal(bytes_of[0][:, :, 3:], bytes_of[1][:, :, 3:])


@dataclass(frozen=True)
class RoundedPages(Pages):
    """Numbers of fp8 in pages of fp32, for plain passes."""

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        super().write(layer, places, *(x.clamp(-448, 448).to(FP8).to(x.dtype) for x in (k, v)))


def target_of(dtype: torch.dtype = torch.float32, backend: str = "triton", kv: str = "fp8") -> Transformer:
    target = tiny_target(3, vocab_size=40, head_dim=16).to(DEVICE, dtype)
    target.attention = choose_backend(backend)
    target.precision = Precision(dtype, kv_name=kv)
    return target


def engine_of(backend: str = "triton", kv: str = "fp8") -> Engine:
    target = target_of(backend=backend, kv=kv)
    draft = tiny_draft(target, window=6, max_lag=3)
    engine = tiny_engine(target, draft, max_length=48, max_rows=2, num_pages=12)
    assert engine.models.fused == (backend == "triton")
    return engine


METHODS: dict[str, Method] = {
    "vanilla": VANILLA,
    "seq": Seq(gamma=2),
    "tree": Tree(tree_shape=(2, 3), max_nodes=5),
    "tree with copying": Tree(tree_shape=(2, 3), max_nodes=5, num_lookup=2),
    "magicdec": MagicDec(gamma=2, sinks=2, window=6),
    "lookup": Lookup(gamma=2),
}
# What the others do these do as well, and each takes long in the interpreter.
QUICK = ("tree with copying",)


def answers(engine: Engine, method: Method) -> list[Sequence]:
    """Two texts at once, one of which comes later to the first page of the other; and that one alone."""
    prompt = [3, 1, 4, 1, 5] * 4
    asked = [Sequence(prompt[: 17 + 3 * row], 6 - row, Sampling(), row, method=method) for row in (0, 1, 1)]
    engine.run(asked[:2])
    engine.forget()
    engine.run(asked[2:])
    return asked


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in METHODS]
)
def test_every_method_says_what_vanilla_says(name: str) -> None:
    """Which is what an engine says that rounds keys and values by torch before anything attends to them."""
    plain, unrounded, engine = engine_of("torch", ""), engine_of("torch", ""), engine_of()
    pages = plain.models.pages
    plain.models.pages = RoundedPages(pages.keys, pages.values, pages.size)
    assert engine.models.pages.keys.dtype == FP8
    expected, found = answers(plain, VANILLA), answers(engine, METHODS[name])
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.num_shared for one in found] == [0, 16, 0]
    other = answers(unrounded, VANILLA)
    assert [one.tokens for one in other] != [one.tokens for one in expected], "then this proves nothing"


def test_pages_take_half_the_bytes() -> None:
    """As planned, and as an engine of a given size has them."""
    config, half = target_of().config, torch.bfloat16
    needs = [
        plan_decoding(config, None, 4096, 3, (4, 4), precision, torch.device("cpu")).needs
        for precision in (Precision(half), Precision(half, kv_name="fp8"))
    ]
    assert 2 * needs[1].kv == needs[0].kv
    assert needs[1].total == needs[0].total - needs[1].kv
    target = target_of(torch.float16)
    engines = [make_engine(target, kv_memory=2**19)]
    target.precision = None
    engines.append(make_engine(target, kv_memory=2**19))
    pages = [engine.models.pages for engine in engines]
    assert pages[0].num_pages == 2 * pages[1].num_pages
    assert pages[0].num_pages * 128 * 2 * 2 * 2 * 16 <= 2**19
    assert engines[0].max_length >= engines[1].max_length


def test_a_loaded_model_uses_and_tells_it(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_folder, folder)
    # The same weights as heads of 16.
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    model = LongSpec.from_pretrained(
        folder, kv_dtype="fp8", attention="triton", max_rows=1, max_length=64, calibrate=False
    )
    assert model.engine.models.pages.keys.dtype == FP8
    answer = model.generate("Hello", raw=True, method="vanilla", max_new_tokens=2, eos_ids=())
    assert answer.to_json()["kv_dtype"] == "fp8"
    assert f"{answer.weights} with KV in fp8 on" in figures(answer)


@pytest.mark.skipif(ON_GPU, reason="a GPU has it")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--kv-dtype fp8", "kv_dtype 'fp8' is for our kernels (attention triton, the default on a GPU), and"),
        (
            "--kv-dtype fp8 --attention triton",
            "needs heads whose size is a multiple of 16, and this target's",
        ),
        ("--kv-dtype fp4", "kv_dtype 'fp4' is unknown; there are: auto, fp8"),
    ],
)
def test_what_cannot_be_is_refused(
    flags: str, told: str, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [["generate", "hi", "--target", str(tiny_folder)]]
    commands += [["info", str(tiny_folder)]] if "--attention" not in flags else []
    for command in commands:
        assert exit_code([*command, *flags.split()]) == 2
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1
