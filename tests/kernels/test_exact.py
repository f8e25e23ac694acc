"""The same bits for a token, whatever it is computed with: alone, as a node of a tree, beside other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from longspec.attention import AttentionPlan, choose_backend
from longspec.cache import Pages
from longspec.decoding.methods import VANILLA, Lookup, Seq, Tree
from longspec.decoding.sampling import Sampling
from longspec.engine.sequence import Sequence
from longspec.kernels.exact import Paths, attend_exactly, chain_paths
from longspec.kernels.tree import tree_sees
from longspec.models.passes import paged_pass
from longspec.models.target import Transformer
from tests.decoding.scripted import ask, tiny_draft, tiny_engine, tiny_target
from tests.kernels.paged import DEVICE, DTYPES, FP8, HAS_FP8, ON_GPU, exact, places, random_tables

HALF = torch.bfloat16 if ON_GPU else torch.float16
PAGE = 128
# Of queries, and of keys and values.
KINDS = [*((dtype, dtype) for dtype in DTYPES), *([(HALF, FP8)] if HAS_FP8 else [])]


@pytest.fixture(autouse=True)
def _same_sums_in_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies by NumPy. On some processors NumPy's library adds the products of a row
    in an order that depends on where the row is in its tile; `einsum` does not use that library."""
    if not ON_GPU:
        product = "...ij,...jk->...ik"
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum(product, a, b, dtype=dtype))


def random_parents(num_nodes: int, generator: torch.Generator) -> list[int]:
    """A tree that is wide at first and then deep."""
    return [0, *(int(torch.randint(max(0, n - 6), n, (), generator=generator)) for n in range(1, num_nodes))]


def path_of(parents: list[int], node: int) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def paths_of(parents: list[int], length: int) -> tuple[Tensor, Tensor]:
    """Positions [N] and nodes [N, depth + 1]."""
    paths = [path_of(parents, node) for node in range(len(parents))]
    deepest = max(map(len, paths))
    nodes = torch.tensor([path + [0] * (deepest - len(path)) for path in paths])
    return torch.tensor([length + len(path) - 1 for path in paths]), nodes


# Prefixes that end around the borders of tiles, of recent keys and of parts, and where parts become larger:
# some nodes of a tree lie before that, some behind.
@pytest.mark.parametrize(("dtype", "kv"), KINDS, ids=str)
@pytest.mark.parametrize(
    ("group", "dim", "lengths"),
    [(1, 64, [0, 62]), (3, 64, [63, 64, 127]), (4, 128, [128, 190]), (7, 64, [319, 4090]), (3, 64, [4095])],
)
def test_a_node_gets_the_bits_of_a_lone_query(
    dtype: torch.dtype, kv: torch.dtype, group: int, dim: int, lengths: list[int]
) -> None:
    if kv != torch.float16 and max(lengths) > 200 and not ON_GPU:
        pytest.skip("takes minutes without a GPU")
    page = PAGE if dtype != torch.float32 else 16
    generator = torch.Generator().manual_seed(group * dim + len(lengths))
    B, K, T = len(lengths), 2 if ON_GPU else 1, 64 if ON_GPU else 12
    tables, num_pages = random_tables([length + T for length in lengths], page, generator)
    k, v = torch.randn(2, K, num_pages * page, dim, generator=generator).to(DEVICE, kv).unbind(0)
    q = torch.randn(B, T, K * group, dim, generator=generator).to(DEVICE, dtype)
    parents = [random_parents(T, generator) for _ in lengths]
    depth = max(len(path_of(each, node)) for each in parents for node in range(T)) - 1
    found = torch.zeros(B, T, depth + 1, dtype=torch.int64, device=DEVICE)
    at = torch.tensor(lengths, device=DEVICE)
    _, positions, _ = tree_sees(torch.tensor(parents, device=DEVICE), depth, at, tables, page, found)
    if ON_GPU:
        # In a round other kernels run in between. Attention reads the positions before its turn.
        torch.cuda.synchronize()
    out, lse = attend_exactly(q, k, v, at, tables, page, Paths(positions, found))
    for b, length in enumerate(lengths):
        true_positions, nodes = paths_of(parents[b], length)
        assert torch.equal(positions[b].cpu(), true_positions)
        entries = places(tables, b, length + T, page)
        for node in (0, 1, T // 2, T - 1) if ON_GPU else (0, T - 1):
            path = path_of(parents[b], node)
            assert found[b, node, : len(path)].tolist() == path == nodes[node, : len(path)].tolist()
            # The same text without a tree: the path's keys right behind the prefix, in pages of its own.
            chosen = torch.cat((entries[:length], entries[length:][path]))
            own, num_own = random_tables([len(chosen)], page, generator)
            own_k, own_v = (part.new_zeros(K, num_own * page, dim) for part in (k, v))
            at_own = places(own, 0, len(chosen), page)
            own_k[:, at_own], own_v[:, at_own] = k[:, chosen], v[:, chosen]
            last = torch.tensor([len(chosen) - 1], device=DEVICE)
            query = q[b, node][None, None]
            alone = attend_exactly(query, own_k, own_v, last, own, page, chain_paths(last[:, None]))
            assert torch.equal(alone[0][0, 0], out[b, node])
            assert torch.equal(alone[1][0, 0], lse[b, node])
            true, _ = exact(
                query[0], k[:, chosen], v[:, chosen],
                torch.ones(1, len(chosen), dtype=torch.bool, device=DEVICE),
            )  # fmt: skip
            bound = 2e-5 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(out[b, node].double(), true[0], atol=bound, rtol=bound)


def states(
    target: Transformer, pages: Pages, table: Tensor, length: int, tokens: Tensor, parents: list[int]
) -> Tensor:
    """Hidden states [N, E] and logits [N, V] of a tree behind so much of a text, side by side."""
    positions, nodes = (part.to(DEVICE) for part in paths_of(parents, length))
    at = torch.tensor([length], device=DEVICE)
    entries = pages.places(table, torch.arange(length, length + len(parents), device=DEVICE)[None])
    paths = Paths(positions[None], nodes[None])
    plan = AttentionPlan(at, table, pages.size, len(parents), paths=paths)
    hidden = target(tokens[None], paged_pass(target, pages, positions[None], entries, plan, True))
    return torch.cat((hidden[0].float(), target.logits(hidden, exact=True)[0]), 1)


@pytest.mark.parametrize(("dtype", "kv"), KINDS if ON_GPU else KINDS[1:], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (7, 1)] if ON_GPU else [(3, 1)])
@torch.inference_mode()
def test_a_model_gives_a_node_the_bits_of_a_step(
    dtype: torch.dtype, kv: torch.dtype, heads: int, kv_heads: int
) -> None:
    changes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 16, "hidden_size": 48}
    target = tiny_target(**changes).to(DEVICE, dtype)
    target.attention = choose_backend("triton")
    page = PAGE if dtype != torch.float32 else 16
    generator = torch.Generator().manual_seed(heads)
    size = target.config.vocab_size
    for length, num_nodes in ((5, 1), (70, 20), (125, 64)) if ON_GPU else ((37, 5),):
        pages = Pages.empty(target.config, 2 * (-(-256 // page)), page, DEVICE, kv)
        tables = torch.arange(1, pages.num_pages + 1, dtype=torch.int32, device=DEVICE).view(2, -1)
        tables = tables.contiguous()
        text = torch.randint(size, (length,), generator=generator).to(DEVICE)
        for table, most in zip(tables, (40, 9), strict=True):  # one text twice, in other chunks
            for start in range(0, length, most):
                part = text[start : start + most]
                states(target, pages, table[None], start, part, [max(0, n - 1) for n in range(len(part))])
        parents = random_parents(num_nodes, generator)
        tokens = torch.randint(size, (num_nodes,), generator=generator).to(DEVICE)
        tree = states(target, pages, tables[:1], length, tokens, parents)
        for node in {0, num_nodes // 2, num_nodes - 1}:
            for depth, on_path in enumerate(path_of(parents, node)):
                token = tokens[on_path : on_path + 1]
                alone = states(target, pages, tables[1:], length + depth, token, [0])
                assert torch.equal(alone[0], tree[on_path]), (length, on_path)


@pytest.mark.skipif(not ON_GPU, reason="takes minutes without a GPU")
def test_an_engine_says_the_same_by_every_method_and_in_every_company() -> None:
    target = tiny_target(vocab_size=40, head_dim=16, hidden_size=48, max_length=512).to(DEVICE, HALF)
    target.attention = choose_backend("triton")
    draft = tiny_draft(target).to(HALF)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(40, (length,), generator=generator).tolist() for length in (70, 3, 40)]
    sizes = {"max_length": 256, "max_rows": 4, "num_pages": 12, "page_size": PAGE, "exact": True}
    for sampling in (Sampling(), Sampling(0.8)):
        engine = tiny_engine(target, draft, **sizes)
        together = [one.tokens for one in ask(engine, prompts, VANILLA, sampling, new=40)]
        assert len(set(map(len, together))) == 3
        for method in (Tree((3, 4, 2)), Seq(3), Lookup()):
            engine.forget()
            assert [one.tokens for one in ask(engine, prompts, method, sampling, new=40)] == together
        engine.forget()
        for index, prompt in enumerate(prompts):
            alone = ask(engine, [prompt], VANILLA, sampling, seed=index, new=40 - 3 * index)
            assert alone[0].tokens == together[index]


@pytest.mark.skipif(not ON_GPU, reason="takes minutes without a GPU")
def test_a_prompt_that_libraries_compute_says_the_same_in_every_company(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever of it is there already, and with pauses."""
    monkeypatch.setattr("longspec.engine.chunks.BESIDE", 2 * PAGE)
    monkeypatch.setattr("longspec.engine.chunks.is_large", lambda config: True)
    monkeypatch.setattr("longspec.engine.engine.is_large", lambda config: True)
    target = tiny_target(vocab_size=40, head_dim=16, hidden_size=48, max_length=2048).to(DEVICE, HALF)
    target.attention = choose_backend("triton")
    document = torch.randint(40, (1200,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [document[:length] for length in (1100, 700, 650, 300, 100, 520, 1000)]
    sizes = {"max_length": 1400, "max_rows": 4, "page_size": PAGE, "exact": True}
    engine = tiny_engine(target, None, num_pages=60, **sizes)
    assert engine.scheduler.grid == 2 * PAGE

    def alone(prompts: list[list[int]], new: int) -> list[list[int]]:
        found = []
        for prompt in prompts:
            engine.forget()
            found += [one.tokens for one in ask(engine, [prompt], VANILLA, new=new)]
        engine.forget()
        return found

    def check(asked: list[Sequence], expected: list[list[int]]) -> None:
        """Answers that are asked for together are cut a little earlier, one after the other."""
        for one, tokens in zip(asked, expected, strict=True):
            assert one.tokens == tokens[: len(one.tokens)]

    answers = alone(prompts, 160)
    turns = [[*prompt, *said, 1, 2, 3] for prompt, said in zip(prompts, answers, strict=True)]
    next_answers = alone(turns, 40)
    for method in (Lookup(), VANILLA):  # what one leaves, the next shares
        asked = ask(engine, prompts, method, new=160)
        check(asked, answers)
    assert max(one.num_shared for one in asked) >= 4 * PAGE
    check(ask(engine, turns, VANILLA, new=40), next_answers)
    few = tiny_engine(target, None, num_pages=14, **sizes)
    check(ask(few, prompts, VANILLA, new=160), answers)
    assert few.scheduler.num_paused > 0
