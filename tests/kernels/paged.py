"""What the tests of kernels share: where they run, and tables of pages."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Triton's interpreter, which runs without a GPU, is silently wrong for bf16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
FP8 = torch.float8_e4m3fn
HAS_FP8 = not ON_GPU or torch.cuda.get_device_capability() >= (8, 9)


def random_tables(rows: list[int], page: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Tables of rows with so many entries, the pages in random order; and how many pages there are.

    They are a view of larger tables, and what is not assigned is 0.
    """
    counts = [-(-num // page) for num in rows]
    numbers = iter((torch.randperm(sum(counts), generator=generator) + 1).tolist())
    tables = torch.zeros(len(rows) + 1, max(counts) + 4, dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor(list(itertools.islice(numbers, count)))
    return tables.to(DEVICE)[: len(rows), : max(counts) + 1], sum(counts) + 1


def places(tables: Tensor, row: int, num: int, page: int) -> Tensor:
    """Where a row's first `num` entries stand."""
    entry = torch.arange(num, device=tables.device)
    return tables[row, entry // page].long() * page + entry % page


def exact(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, H, D] over k, v [K, S, D] as far as `sees` [T, S] allows, in fp64; all 0 and -inf for none."""
    group = q.shape[1] // k.shape[0]
    k, v = (part.double().repeat_interleave(group, 0) for part in (k, v))
    scores = torch.einsum("thd,hsd->ths", q.double(), k) / q.shape[2] ** 0.5
    scores = scores.masked_fill(~sees[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("ths,hsd->thd", weights, v), scores.logsumexp(-1)
