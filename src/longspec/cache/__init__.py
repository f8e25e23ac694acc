"""Where keys and values live."""

from longspec.cache.kv import KVCache, Slots
from longspec.cache.ring import DraftCache

__all__ = ["DraftCache", "KVCache", "Slots"]
