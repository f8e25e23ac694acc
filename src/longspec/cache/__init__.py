"""Where keys and values live."""

from longspec.cache.pages import Pages
from longspec.cache.pool import PagePool
from longspec.cache.ring import DraftRing

__all__ = ["DraftRing", "PagePool", "Pages"]
