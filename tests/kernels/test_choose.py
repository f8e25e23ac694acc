"""The kernels choose what `choose` does; a level of the tree is what topk over log-softmax gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspec.data.writer import draw
from longspec.decoding.choose import Sampling, choose, gumbel
from longspec.kernels.choose import choose_tokens
from longspec.kernels.draw import draw_tokens
from longspec.kernels.noise import gumbel_noise
from longspec.kernels.topk import best_children

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SETTINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.3),
    Sampling(1.0),
    Sampling(0.7, top_k=40),
    Sampling(1.5, top_p=0.9),
    Sampling(1.0, top_p=0.3),
    Sampling(0.6, top_k=20, top_p=0.95, min_p=0.02, repetition_penalty=1.1),
    Sampling(1e-30, min_p=0.3),
    Sampling(2.0, top_k=1),
    Sampling(1.0, top_p=1e-6),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_tokens_are_those_of_choose(sampling: Sampling) -> None:
    many = 2000 if DEVICE.type == "cuda" else 8
    generator = torch.Generator().manual_seed(1)
    for size, spread, num_rows in ((40, 1.0, many // 4), (1500, 4.0, 3), (4999, 0.1, many)):
        logits = spread * torch.randn(num_rows, size, generator=generator)
        logits[:, 3] = logits[:, 1]  # a tie, at times for the best
        seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
        positions = torch.randint(300_000, (num_rows,), generator=generator)
        seen = torch.rand(num_rows, size, generator=generator) < 0.3
        expected = choose(logits, sampling, seeds, positions, seen)
        found = choose_tokens(
            logits.to(DEVICE),
            seeds.to(DEVICE),
            positions.to(DEVICE),
            sampling.temperature,
            int(sampling.top_k),
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            seen.to(DEVICE),
        )
        assert torch.equal(found.cpu(), expected), (found.cpu() != expected).sum()


def test_one_seed_may_be_expanded_over_all_nodes_of_a_row() -> None:
    """As `flatten` leaves it at batch 1: a view without any stride, which reads past its one number."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    seeds, positions = torch.tensor([[7]]).expand(1, 6).flatten(), torch.arange(6)
    assert seeds.stride() == (0,)
    expected = choose(logits, Sampling(1.0), seeds, positions)
    given = torch.tensor([7]).to(DEVICE).expand(6)
    found = choose_tokens(logits.to(DEVICE), given, positions.to(DEVICE), 1.0)
    assert torch.equal(found.cpu(), expected)
    noise = gumbel_noise(given, positions.to(DEVICE), torch.arange(40).to(DEVICE))
    torch.testing.assert_close(noise[0].cpu(), gumbel(seeds, positions, torch.arange(40)).float())


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -float("inf")])
def test_nonsense_gives_some_token(nonsense: float) -> None:
    logits = torch.full((2, 3000), nonsense, device=DEVICE)
    seeds = positions = torch.arange(2, device=DEVICE)
    tokens = choose_tokens(logits, seeds, positions, 1.0, top_p=0.9)
    assert ((tokens >= 0) & (tokens < 3000)).all()


def test_noise_is_that_of_choose() -> None:
    seeds, positions, tokens = torch.tensor([5, -(2**62)]), torch.tensor([0, 262143]), torch.arange(5000)
    noise = gumbel_noise(seeds.to(DEVICE), positions.to(DEVICE), tokens.to(DEVICE), 2, 3)
    for further, part in enumerate(noise.cpu()):
        exact = gumbel(seeds, positions + 2 + further, tokens).float()
        torch.testing.assert_close(part, exact, atol=0, rtol=2e-7)


def grown(logits: Tensor, scores: Tensor, width: int, *given: object) -> list[Tensor]:
    """The children of a level that stands behind two other nodes; parents are counted from its first."""
    B, n = scores.shape
    kinds = (torch.int64, torch.int64, torch.float32)
    tree = [torch.zeros(B, 2 + n + width + 1, dtype=kind, device=DEVICE) for kind in kinds]
    tree[2][:, 2 : 2 + n] = scores
    best_children(logits.to(DEVICE), tuple(tree), range(2, 2 + n), width, *given)  # type: ignore[arg-type]
    tokens, parents, best = (part[:, 2 + n :].cpu() for part in tree)
    assert [int(part[:, -1].abs().sum()) for part in (tokens, parents, best)] == [0, 0, 0]
    return [tokens[:, :-1], parents[:, :-1] - 2, best[:, :-1]]


@pytest.mark.parametrize(("n", "size", "width"), [(1, 50, 8), (3, 9000, 64), (5, 20000, 7), (2, 3, 64)])
@pytest.mark.parametrize("sampled", [False, True])
def test_children_are_the_best_of_the_level(n: int, size: int, width: int, sampled: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = 3 * torch.randn(2, n, size, generator=generator)
    logits[0, 0, 1] = -torch.inf
    scores, noise = (torch.randn(2, m, generator=generator) for m in (n, size))
    temperature = 0.7 if sampled else 1.0
    exact = logits.double() / temperature + (noise[:, None] if sampled else 0)
    exact = scores[:, :, None].double() + exact.log_softmax(-1)
    given = (temperature, noise.to(DEVICE)) if sampled else ()
    width = min(width, n * size)
    tokens, parents, best = grown(logits, scores, width, *given)
    # what torch would keep: the best of each node, then the best of those
    expected = exact.topk(min(width, size)).values.flatten(1).topk(width).values
    torch.testing.assert_close(best.double(), expected, atol=1e-5, rtol=1e-5)
    # and the tokens and nodes are the ones with those scores, none of them twice
    flat = parents * size + tokens
    torch.testing.assert_close(exact.flatten(1).gather(1, flat).float(), best, atol=1e-5, rtol=1e-5)
    assert all(len(set(row)) == len(row) for row in flat.tolist())


def test_a_draft_that_computes_nan_still_gives_a_level() -> None:
    logits = torch.full((1, 2, 300), torch.nan, device=DEVICE)
    tokens, parents, best = grown(logits, torch.zeros(1, 2), 16)
    assert (best == -torch.inf).all()
    assert ((tokens >= 0) & (tokens < 300)).all()
    assert ((parents >= 0) & (parents < 2)).all()


@pytest.mark.parametrize(("B", "V"), [(40, 49152), (120, 97)])
def test_draws_are_those_of_the_writer(B: int, V: int) -> None:
    generator = torch.Generator().manual_seed(V)
    logits = (3 * torch.randn(B, V, generator=generator)).to(DEVICE)
    logits[:, V // 2 :] = -torch.inf  # parts without any weight
    temperatures = torch.tensor([0, 0.7, 1, 1e-3], device=DEVICE).repeat(B)[:B]
    seeds, positions = (torch.randint(2**62, (B,), generator=generator).to(DEVICE) for _ in range(2))
    tokens = draw_tokens(logits, temperatures, seeds, positions)
    assert torch.equal(tokens, draw(logits, temperatures, seeds, positions))
