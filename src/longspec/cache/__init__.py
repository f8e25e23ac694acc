"""Where keys and values live."""

from longspec.cache.kv import KVCache, Slots

__all__ = ["KVCache", "Slots"]
