"""Which pages are free, which sequences hold the others, and which beginnings of texts are in them."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from heapq import heapify, heappop, heappush

import numpy as np

from longspec.cache.pages import DUMP


class PagePool:
    """Gives out pages and takes them back; runs on the host.

    A full page is remembered by the hash of all tokens up to its end. Sequences with the same beginning share
    such pages and never write them. A remembered page that no sequence holds is kept while other pages are
    free; then the least recently used one is given out first.
    """

    def __init__(self, num_pages: int, size: int) -> None:
        self.size, self.num_pages = size, num_pages
        self._free = np.ones(num_pages + 1, dtype=bool)
        self._free[DUMP] = False
        self._num_free = num_pages
        # Runs of pages (-length, start, end) that were free when they were looked for, as a heap, and how
        # many pages were freed since.
        self._runs: list[tuple[int, int, int]] = []
        self._num_freed = 0
        self._holders: Counter[int] = Counter()
        self._hashes: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()
        self._promised: Counter[bytes] = Counter()

    @property
    def num_available(self) -> int:
        return self._num_free + len(self._unheld)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        """`count` pages, or None if there are not enough.

        `after` is the last page of the caller. If the page that follows it is free, it is preferred, because
        consecutive pages are read as one.
        """
        if count > self.num_available:
            return None
        taken: list[int] = []
        for _ in range(count):
            if not self._num_free:
                self._forget(next(iter(self._unheld)))
            following = DUMP if after is None else after + 1
            if following > self.num_pages or not self._free[following]:
                following = self._room()
            self._free[following] = False
            self._num_free -= 1
            taken.append(following)
            after = following
        self._holders.update(taken)
        return taken

    def _room(self) -> int:
        """Where a new run of pages begins: the middle of the longest free one, so that whoever holds the
        pages before it can grow as well."""
        while True:
            if not self._runs or 8 * self._num_freed > self.num_pages:
                self._find_runs()
            _, start, end = heappop(self._runs)
            first = start if start == DUMP + 1 else (start + end) // 2
            for part in ((start, first), (first + 1, end)):
                if part[0] < part[1]:
                    heappush(self._runs, (part[0] - part[1], *part))
            if self._free[first]:  # it may have been taken since the run was found
                return first

    def _find_runs(self) -> None:
        edges = np.flatnonzero(np.diff(np.concatenate(([0], self._free.view(np.int8), [0]))))
        self._runs = [(start - end, start, end) for start, end in edges.reshape(-1, 2).tolist()]
        heapify(self._runs)
        self._num_freed = 0

    def hashes(self, tokens: Sequence[int], border: int | None = None) -> list[bytes]:
        """One hash for each full page of a text, over all tokens up to the end of that page.

        If there is a `border`, the tokens before it are computed in another way than those after it. Then a
        hash also tells which pages of the text are computed in which way.
        """
        found, digest, numbers = [], b"", memoryview(array("q", tokens)).cast("B")
        size = 8 * self.size
        for start in range(0, len(numbers) - size + 1, size):
            if border is not None and start == 8 * border:
                digest += b"border"
            whole = blake2b(digest, digest_size=16)
            whole.update(numbers[start : start + size])
            digest = whole.digest()
            found.append(digest)
        return found

    def share(self, hashes: Sequence[bytes]) -> list[int]:
        """The remembered pages of a text's beginning, up to the first hash that is not known."""
        pages: list[int] = []
        for one in hashes:
            page = self._pages.get(one)
            if page is None:
                break
            pages.append(page)
        for page in pages:
            self._holders[page] += 1
            self._unheld.pop(page, None)
        return pages

    def promise(self, hashes: Iterable[bytes]) -> None:
        """Note that pages with these hashes are being computed, so that other sequences can wait for them."""
        self._promised.update(hashes)

    def withdraw(self, hashes: Iterable[bytes]) -> None:
        """End a promise: the pages are ready, or will never be."""
        for one in hashes:
            self._promised[one] -= 1
            if self._promised[one] <= 0:
                del self._promised[one]

    def is_promised(self, one: bytes) -> bool:
        """Whether a sequence computes this page now."""
        return one in self._promised

    def remember(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Let other sequences share these full pages. From now on, no one may write them."""
        for page, one in zip(pages, hashes, strict=False):
            if page not in self._hashes and one not in self._pages:
                self._hashes[page] = one
                self._pages[one] = page

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back; they are in the order of their text."""
        for page in reversed(pages):  # so that the end of a text is evicted before its beginning
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._hashes:
                self._unheld[page] = None
            else:
                self._set_free(page)

    def forget_all(self) -> None:
        """Forget all texts; sequences keep the pages that they hold."""
        for page in list(self._unheld):
            self._forget(page)
        self._hashes.clear()
        self._pages.clear()

    def _forget(self, page: int) -> None:
        del self._unheld[page]
        del self._pages[self._hashes.pop(page)]
        self._set_free(page)

    def _set_free(self, page: int) -> None:
        self._free[page] = True
        self._num_free += 1
        self._num_freed += 1
