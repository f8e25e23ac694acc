"""The kernels choose what `choose` does; a level of the tree is what topk over log-softmax gives."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from longspec.decoding.choose import SamplingRows, choose, gumbel
from longspec.decoding.sampling import Sampling
from longspec.kernels.choose import choose_tokens
from longspec.kernels.noise import gumbel_noise
from longspec.kernels.topk import best_children
from tests.kernels.paged import DEVICE

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


class Rows(NamedTuple):
    """Settings of rows, on the device."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    seen: Tensor | None


def rows_of(settings: list[Sampling], seen: Tensor | None) -> Rows:
    """The first rows of larger tensors."""

    def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        values = [getattr(sampling, name) for sampling in settings]
        return torch.tensor([*values, 7], dtype=dtype, device=DEVICE)[:-1]

    if seen is not None:
        wider = torch.ones(seen.shape[0], seen.shape[1] + 5, dtype=torch.bool, device=DEVICE)
        wider[:, :-5] = seen.to(DEVICE)
        seen = wider[:, :-5]
    top_k = column("top_k", torch.int64)
    columns = (column("temperature"), top_k, column("top_p"), column("min_p"), column("repetition_penalty"))
    return Rows(*columns, seen)


def random_rows(B: int, N: int, V: int, spread: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [B * N, V], seeds [B], positions [B * N] and seen [B, V]."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(B * N, V, generator=generator)
    logits[:, 3] = logits[:, 1]  # a tie, at times for the best
    seeds = torch.randint(-(2**63), 2**63 - 1, (B,), generator=generator)
    positions = torch.randint(300_000, (B * N,), generator=generator)
    return logits, seeds, positions, torch.rand(B, V, generator=generator) < 0.3


def choose_alike(
    logits: Tensor, sampling: Sampling, seeds: Tensor, positions: Tensor, seen: Tensor
) -> Tensor:
    """`choose` for rows of the same settings."""
    rows = SamplingRows.of([sampling] * len(logits), logits.shape[1], logits.device)
    return choose(logits, rows, seeds, positions, True, seen)


@pytest.mark.parametrize(
    ("V", "spread", "N", "rows"),
    [(40, 1.0, 2, None), (1500, 4.0, 2, None), (4999, 0.1, 1, None), (4999, 0.1, 4, 2)],
)
def test_rows_of_all_settings_choose_together(V: int, spread: float, N: int, rows: int | None) -> None:
    """Each row as `choose` does for it alone: with the penalty, and without any marks."""
    N = 200 * N if DEVICE.type == "cuda" else N
    for marked in (True, False):
        settings = [s for s in SETTINGS if marked or s.repetition_penalty == 1][-(rows or 99) :]
        B = len(settings)
        logits, seeds, positions, seen = random_rows(B, N, V, spread, V + N)
        expected = [
            choose_alike(
                logits[b * N : (b + 1) * N],
                sampling,
                seeds[b].expand(N),
                positions[b * N : (b + 1) * N] + 2,
                seen[b].expand(N, V),
            )
            for b, sampling in enumerate(settings)
        ]
        given = rows_of(settings, seen if marked else None)
        found = choose_tokens(
            logits.to(DEVICE), given, seeds.to(DEVICE), positions.to(DEVICE), True, ahead=2
        ).cpu()
        assert torch.equal(found, torch.cat(expected)), (found != torch.cat(expected)).view(B, N).sum(1)


def test_greedy_rows_read_no_settings() -> None:
    logits, seeds, positions, _ = random_rows(3, 2, 2100, 1.0, 0)
    given = rows_of([Sampling(1.0, top_p=0.1, repetition_penalty=3.0)] * 3, None)
    found = choose_tokens(logits.to(DEVICE), given, seeds.to(DEVICE), positions.to(DEVICE), False)
    assert torch.equal(found.cpu(), logits.argmax(-1))


def test_the_penalty_knows_a_nodes_ancestors() -> None:
    settings = [
        Sampling(repetition_penalty=4.0),
        Sampling(0.9, top_p=0.9, top_k=9, repetition_penalty=1.7),
        Sampling(1.0),
    ]
    B, N, V = 3, 6, 12
    parents = torch.tensor([[0, 0, 0, 1, 1, 3], [0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 0]])
    tokens = torch.randint(V, (B, N), generator=torch.Generator().manual_seed(3))
    differs = 0
    for seed in range(2):
        logits, seeds, positions, seen = random_rows(B, N, V, 1.0, seed)
        occurred = seen[:, None].repeat(1, N, 1)
        for b in range(B):
            for node in range(N):
                here = node
                for _ in range(N):
                    occurred[b, node, tokens[b, here]] = True
                    here = int(parents[b, here])
        expected, alone = (
            torch.cat(
                [
                    choose_alike(
                        logits.view(B, N, V)[b], s, seeds[b].expand(N), positions.view(B, N)[b], marks[b]
                    )
                    for b, s in enumerate(settings)
                ]
            )
            for marks in (occurred, seen[:, None].expand(B, N, V))
        )
        differs += int((expected != alone).sum())
        path = (tokens.to(DEVICE), parents.to(DEVICE), 5)
        given = (rows_of(settings, seen), seeds.to(DEVICE), positions.to(DEVICE), True)
        assert torch.equal(choose_tokens(logits.to(DEVICE), *given, path=path).cpu(), expected)
    assert differs, "the ancestors make a difference"


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -float("inf")])
def test_nonsense_gives_some_token(nonsense: float) -> None:
    logits = torch.full((2, 3000), nonsense, device=DEVICE)
    seeds = positions = torch.arange(2, device=DEVICE)
    given = rows_of([Sampling(1.0, top_p=0.9), Sampling(0.7, top_k=5)], None)
    tokens = choose_tokens(logits, given, seeds, positions, True)
    assert ((tokens >= 0) & (tokens < 3000)).all()


def test_noise_is_that_of_choose() -> None:
    seeds, positions = torch.tensor([5, -(2**62), 9]), torch.tensor([0, 262143, 3])
    tokens, temperature = torch.arange(5000), torch.tensor([0.5, 1.0, 0.0])
    rows = (seeds.to(DEVICE), positions.to(DEVICE))
    noise = gumbel_noise(*rows, tokens.to(DEVICE), temperature.to(DEVICE), 2, 3)
    for further, part in enumerate(noise.cpu()):
        exact = gumbel(seeds, positions + 2 + further, tokens).float()
        exact[2] = 0
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
    exact = logits.double()
    if sampled:  # the first row; the second is greedy
        exact[0] = exact[0] / 0.7 + noise[0]
    exact = scores[:, :, None].double() + exact.log_softmax(-1)
    given = (torch.tensor([0.7, 0.0], device=DEVICE), noise.to(DEVICE)) if sampled else ()
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
