"""The cache's verbs, against plain lists."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspec.cache import KVCache
from longspec.config import ModelConfig

CONFIG = ModelConfig(
    family="llama",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=2,
    max_length=64,
)


def contents(cache: KVCache) -> list[list[float]]:
    """The prefix of each row, by the number each entry was written with."""
    for buffer, sign in ((cache.keys, 1), (cache.values, -1)):
        for layer in range(CONFIG.num_layers):
            same = buffer[layer, :, :1, :, :1] + 1000 * (layer - 0) * sign
            for row, length in enumerate(cache.lengths.tolist()):
                expected = same[row, :, :length].expand(2, length, 2)
                assert torch.equal(buffer[layer, row, :, :length] + 1000 * layer * sign, expected)
    return [cache.keys[0, row, 0, :length, 0].tolist() for row, length in enumerate(cache.lengths.tolist())]


def write(cache: KVCache, numbers: torch.Tensor) -> None:
    """Write entries [B, T] past the prefix of every layer, marked by layer and by key or value."""
    slots = cache.slots(numbers.shape[1])
    for layer in range(CONFIG.num_layers):
        marked = numbers[:, :, None, None].expand(-1, -1, 2, 2).float()
        cache.write(layer, slots, marked - 1000 * layer, -(marked - 1000 * layer))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_verbs_do_what_lists_do(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 3))
    cache = KVCache.empty(CONFIG, num_rows, 32, torch.device("cpu"), torch.float32)
    cache.keys.fill_(torch.nan)
    rows: list[list[float]] = [[] for _ in range(num_rows)]
    fresh = 1
    for _ in range(data.draw(st.integers(1, 6))):
        T = data.draw(st.integers(1, 5))
        if max(map(len, rows)) + T > cache.capacity:
            cache = cache.grown(cache.capacity + 16)
        numbers = torch.arange(fresh, fresh + num_rows * T).view(num_rows, T)
        fresh += num_rows * T
        write(cache, numbers)
        paths, kept = [], []
        for row in range(num_rows):
            path = sorted(data.draw(st.sets(st.integers(0, T - 1), min_size=1)))
            kept.append(data.draw(st.integers(0, len(path))))
            rows[row] += [float(numbers[row, node]) for node in path[: kept[-1]]]
            paths.append(path + [T - 1] * (T - len(path)))
        cache.commit(torch.tensor(paths), torch.tensor(kept))
        assert contents(cache) == rows
        if data.draw(st.booleans()):
            lengths = [data.draw(st.integers(0, 40)) for _ in rows]
            cache.truncate(torch.tensor(lengths))
            rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
            assert contents(cache) == rows


def test_a_row_is_a_view() -> None:
    cache = KVCache.empty(CONFIG, 3, 8, torch.device("cpu"), torch.float32)
    one = cache.row(1)
    write(one, torch.tensor([[5, 6]]))
    one.advance(2)
    assert cache.lengths.tolist() == [0, 2, 0]
    assert contents(cache) == [[], [5.0, 6.0], []]
