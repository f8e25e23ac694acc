"""The memory of keys and values: the target's pages and the draft's ring."""

from longspec.cache.pages import Pages
from longspec.cache.pool import PagePool
from longspec.cache.ring import DraftRing

__all__ = ["DraftRing", "PagePool", "Pages"]
