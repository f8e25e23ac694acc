"""The end of a round by one kernel against the same in plain Python."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from longspec.kernels.settle import settle_round
from tests.kernels.paged import DEVICE
from tests.kernels.test_tree import random_levels

HIDDEN, VOCABULARY = 40, 20


class Rows(NamedTuple):
    lengths: Tensor
    limits: Tensor
    eos_ids: Tensor
    running: Tensor
    active: Tensor
    num_unread: Tensor
    report: Tensor
    feature: Tensor
    text: Tensor
    seen: Tensor | None

    def copies(self) -> Rows:
        return Rows(*(None if part is None else part.clone() for part in self))  # type: ignore[arg-type]


def some_rows(width: int, marked: bool) -> Rows:
    """Six rows, the first of larger tensors: one has ended, one waits, one is near its limit."""
    B = 6
    lengths = torch.tensor([4, 5, 6, 7, 8, 9], device=DEVICE)
    limits = torch.tensor([30, 30, 30, 30, 11, 30], device=DEVICE)
    eos_ids = torch.tensor([[3, -1, 9, 9], [-1, -1, 9, 9]] * 3, device=DEVICE)[:, :2]
    running = torch.tensor([1, 1, 0, 1, 1, 1, 1], device=DEVICE).bool()[:B]
    active = torch.tensor([1, 1, 1, 0, 1, 1, 1], device=DEVICE).bool()[:B]

    def filled(*shape: int) -> Tensor:
        return torch.full(shape, -5, device=DEVICE)

    seen = torch.zeros(B, VOCABULARY + 3, dtype=torch.bool, device=DEVICE)[:, :VOCABULARY]
    feature = torch.zeros(B, HIDDEN + 8, device=DEVICE)[:, :HIDDEN]
    report, text = filled(B, width + 4)[:, : width + 2], filled(B, 40)[:, :35]
    return Rows(
        *(lengths, limits, eos_ids, running, active, filled(B), report, feature, text),
        seen if marked else None,
    )


def settle_plainly(
    tokens: Tensor, parents: Tensor, choices: Tensor, hidden: Tensor, rows: Rows, width: int
) -> tuple[Tensor, Tensor]:
    path, num_kept = torch.zeros(len(tokens), width, dtype=torch.int64), []
    for b in range(len(tokens)):
        if not (rows.running[b] and rows.active[b]):
            rows.report[b, 0] = 0
            num_kept.append(0)
            continue
        nodes = [0]
        while len(nodes) < width:
            is_child = (parents[b] == nodes[-1]) & (tokens[b] == choices[b, nodes[-1]])
            is_child[0] = False
            if not is_child.any():
                break
            nodes.append(int(is_child.nonzero()[0, 0]))
        said, length, limit = choices[b, nodes].tolist(), int(rows.lengths[b]), int(rows.limits[b])
        path[b] = torch.tensor(nodes + nodes[-1:] * (width - len(nodes)))
        num_kept.append(len(said))
        rows.num_unread[b] = rows.report[b, 0] = len(said)
        rows.report[b, 1 : 1 + len(said)] = torch.tensor(said)
        for place, token in enumerate(said, length + 1):
            if place < limit:
                rows.text[b, place] = token
            if rows.seen is not None:
                rows.seen[b, token] = True
        length += len(said)
        if set(said) & set(rows.eos_ids[b].tolist()) or length + 1 >= limit:
            rows.running[b] = False
        rows.lengths[b] = min(length, limit - 1)
        rows.feature[b] = hidden[b, nodes[-1]]
    return path, torch.tensor(num_kept)


@pytest.mark.parametrize(("shape", "marked"), [((), True), ((1, 1, 1), False), ((3, 5, 4), True)])
def test_a_round_is_settled_alike(shape: tuple[int, ...], marked: bool) -> None:
    generator, width = torch.Generator().manual_seed(4), len(shape) + 1
    parents = random_levels(6, shape, 5)
    for _ in range(8):  # a vocabulary so small that some paths are long, some ended, some repeated
        tokens, choices = (torch.randint(4, parents.shape, generator=generator).to(DEVICE) for _ in range(2))
        hidden = torch.randn(*parents.shape, HIDDEN, generator=generator).to(DEVICE)
        rows = some_rows(width, marked)
        before, expected = rows.lengths.clone(), rows.copies()
        true_path, true_kept = settle_plainly(tokens, parents, choices, hidden, expected, width)
        path, num_kept, old = settle_round(tokens, parents, choices, hidden, rows, width)
        assert torch.equal(old, before)
        assert torch.equal(path.cpu(), true_path)
        assert torch.equal(num_kept.cpu(), true_kept)
        # What the report has behind a row's tokens is nobody's.
        for b, count in enumerate(true_kept.tolist()):
            assert torch.equal(rows.report[b, : 1 + count], expected.report[b, : 1 + count])
        for name in set(Rows._fields) - {"report"}:
            one, other = getattr(rows, name), getattr(expected, name)
            assert one is None or torch.equal(one, other), name
