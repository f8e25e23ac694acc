"""Pages of KV: their verbs against plain lists, and a pool that gives nothing to two who do not share."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from longspec.cache import PagePool, Pages
from longspec.config import ModelConfig

CONFIG = ModelConfig("llama", 8, 8, 8, 2, 2, 2, 2, 64)
SIZE, ROWS = 4, 3


def contents(pages: Pages, tables: torch.Tensor, lengths: list[int]) -> list[list[float]]:
    """Each row's entries, by the number each was written with."""
    found = []
    for row, length in enumerate(lengths):
        places = pages.places(tables[row : row + 1], torch.arange(length)[None])[0]
        for layer in range(CONFIG.num_layers):
            k, v = (part[:, places] for part in pages.layer(layer))
            assert torch.equal(k, k[:1, :, :1].expand_as(k))
            assert torch.equal(v, -k)
            assert torch.equal(k + 1000 * layer, pages.keys[0][:, places])
        found.append(pages.keys[0, 0, places, 0].tolist())
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_verbs_do_what_lists_do(data: st.DataObject) -> None:
    """With pages in any order, and rows that write, keep a path, and are cut."""
    pages = Pages.empty(CONFIG, ROWS * 12, SIZE, torch.device("cpu"), torch.float32)
    order = data.draw(st.permutations(range(1, ROWS * 12 + 1)))
    tables = torch.tensor(order, dtype=torch.int32).view(ROWS, 12)
    rows: list[list[float]] = [[] for _ in range(ROWS)]
    fresh = 1
    for _ in range(data.draw(st.integers(1, 6))):
        T = data.draw(st.integers(1, 6))
        numbers = torch.arange(fresh, fresh + ROWS * T).view(ROWS, T)
        fresh += ROWS * T
        lengths = torch.tensor([len(row) for row in rows])
        places = pages.places(tables, lengths[:, None] + torch.arange(T))
        for layer in range(CONFIG.num_layers):
            marked = numbers[:, :, None, None].expand(-1, -1, 2, 2).float() - 1000 * layer
            pages.write(layer, places, marked, -marked)
        paths, kept = [], []
        for row in range(ROWS):
            path = sorted(data.draw(st.sets(st.integers(0, T - 1), min_size=1)))
            kept.append(data.draw(st.integers(0, len(path))))
            rows[row] += [float(numbers[row, node]) for node in path[: kept[-1]]]
            paths.append(path + [T - 1] * (T - len(path)))
        pages.commit(tables, lengths, torch.tensor(paths), torch.tensor(kept))
        assert contents(pages, tables, [len(row) for row in rows]) == rows
        rows = [row[: data.draw(st.integers(0, 40))] for row in rows]
    assert not pages.keys[:, :, :SIZE].any(), "the dump page is nobody's"
    assert pages.num_pages == ROWS * 12


class Pool(RuleBasedStateMachine):
    """Texts that come, are computed page by page, and go."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, SIZE)
        self.held: list[tuple[list[int], list[int], int]] = []
        """Text, pages, and how many of them are full and remembered."""
        self.written: dict[int, tuple[int, ...]] = {}
        """What each page holds: all tokens up to its end."""

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=20), computed=st.integers(0, 5))
    def come(self, text: list[int], computed: int) -> None:
        hashes = self.pool.hashes(text)
        shared = self.pool.share(hashes[: (len(text) - 1) // SIZE])
        for index, page in enumerate(shared):
            assert self.written[page] == tuple(text[: (index + 1) * SIZE]), "it holds what was asked for"
        others = {page for _, pages, _ in self.held for page in pages} | set(shared)
        needed, available = len(text) // SIZE + 1 - len(shared), self.pool.num_available
        own = self.pool.take(needed, shared[-1] if shared else None)
        assert (own is None) == (needed > available)
        if own is None:
            self.pool.release(shared)
            return
        assert len(set(own)) == needed
        assert not set(own) & others
        assert not set(own) & {0}
        full = min(len(shared) + computed, len(hashes))
        for index in range(len(shared), full):
            self.written[[*shared, *own][index]] = tuple(text[: (index + 1) * SIZE])
        for page in own[max(full - len(shared), 0) :]:
            self.written[page] = ()
        self.pool.remember([*shared, *own][:full], hashes[:full])
        assert self.found(text) >= full, "it is found again at once"
        self.held.append((text, [*shared, *own], full))

    def found(self, text: list[int]) -> int:
        pages = self.pool.share(self.pool.hashes(text))
        self.pool.release(pages)
        return len(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        text, pages, full = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        available = self.pool.num_available
        # A page of the same text that somebody else computed may have gone meanwhile.
        self.pool.remember(pages[:full], self.pool.hashes(text))
        self.pool.release(pages)
        still = {page for _, others, _ in self.held for page in others}
        assert self.pool.num_available == available + len(set(pages) - still)
        assert self.found(text) >= full, "and it is still remembered"

    @rule()
    def forget(self) -> None:
        self.pool.forget_all()
        self.held = [(text, pages, 0) for text, pages, _ in self.held]
        for text, _, _ in self.held:
            assert self.found(text) == 0

    @invariant()
    def adds_up(self) -> None:
        held = {page for _, pages, _ in self.held for page in pages}
        assert self.pool.num_held == len(held)
        assert self.pool.num_available == 12 - len(held)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, deadline=None, stateful_step_count=30)


def remembered(pool: PagePool, text: list[int]) -> list[int]:
    """Compute a text and let it go; its pages."""
    pages = [page for _ in range(len(text) // SIZE) for page in pool.take(1) or []]
    pool.remember(pages, pool.hashes(text))
    pool.release(pages)
    return pages


def test_the_least_recently_used_goes_first_and_a_texts_end_before_its_beginning() -> None:
    pool = PagePool(6, SIZE)
    one, two, three = ([token] * 2 * SIZE for token in (1, 2, 3))
    for text in (one, two, three):
        remembered(pool, text)
    pool.release(pool.share(pool.hashes(one)))  # used again
    assert pool.take(1) is not None
    assert [len(pool.share(pool.hashes(text))) for text in (two, one, three)] == [1, 2, 2]
    assert pool.take(1) is None, "the others are held now"


def test_pages_in_a_row_are_preferred() -> None:
    pool = PagePool(20, SIZE)
    first = pool.take(3)
    assert first == [1, 2, 3]
    second = pool.take(2)
    assert second is not None
    assert second[1] == second[0] + 1
    assert second[0] > 6, "with room for the first to grow"
    assert pool.take(2, first[-1]) == [4, 5]
    assert pool.take(1, second[-1]) == [second[-1] + 1]


def test_promises_are_counted() -> None:
    pool = PagePool(4, SIZE)
    hashes = pool.hashes([1] * 12)
    pool.promise(hashes)
    pool.promise(hashes[:1])
    pool.withdraw(hashes)
    assert [pool.is_promised(one) for one in hashes] == [True, False, False]
    pool.withdraw(hashes[:1])
    assert not pool.is_promised(hashes[0])


def test_a_hash_stands_for_all_tokens_up_to_its_page() -> None:
    pool = PagePool(4, SIZE)
    texts = [list(text) for text in itertools.product((0, 1, 256, -1), repeat=SIZE)]
    assert len({pool.hashes(text)[0] for text in texts}) == len(texts)
    assert pool.hashes([1] * 8)[1] != pool.hashes([2, *[1] * 7])[1]
    assert pool.hashes([1] * 7) == pool.hashes([1] * 11)[:1]
    assert pool.hashes([1] * 3) == []


@pytest.mark.parametrize("count", [0, 4])
def test_all_pages_can_be_had(count: int) -> None:
    pool = PagePool(4, SIZE)
    assert len(pool.take(count) or []) == count
    assert pool.take(5) is None
    assert pool.num_available == 4 - count
