"""Where a row's entries are in the pages of KV.

All rows share one allocation of S = num_pages * page entries. Entry e of row b is at
`tables[b, e // page] * page + e % page`. Unassigned table entries are 0: page 0 is the dump page, which takes
the writes to discard and always holds finite numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def place_of(table, entry, mask, PAGE: tl.constexpr) -> tl.tensor:
    """The indices in S of a row's entries, int64. `table` points to the row's table. `mask` is a block or
    None; entries that it excludes get page 0."""
    if mask is None:
        number = tl.load(table + entry // PAGE)
    else:
        number = tl.load(table + entry // PAGE, mask=mask, other=0)
    return number.to(tl.int64) * PAGE + entry % PAGE


def check_tables(tables: Tensor, page: int) -> None:
    """Assert what the kernels assume about tables [B, M] and the size of a page."""
    assert tables.dtype == torch.int32, tables.dtype
    assert page > 0, page
    assert page & (page - 1) == 0, f"a page has {page} entries; it must be a power of two"
    assert tables.stride(1) == 1 or tables.shape[1] == 1, "a row's table must be contiguous"
