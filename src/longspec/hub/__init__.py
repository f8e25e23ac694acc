"""Find models: by short name, hub id, local folder or `.gguf` file, and the embedded default."""

from longspec.hub.cache import cache_dir
from longspec.hub.registry import DEFAULT_TARGET, MODELS, ModelEntry, default_draft, nearest, shipped_draft
from longspec.hub.resolve import TargetFiles, on_disk, resolve, resolve_draft, resolve_tokenizer

__all__ = [
    "DEFAULT_TARGET",
    "MODELS",
    "ModelEntry",
    "TargetFiles",
    "cache_dir",
    "default_draft",
    "nearest",
    "on_disk",
    "resolve",
    "resolve_draft",
    "resolve_tokenizer",
    "shipped_draft",
]
