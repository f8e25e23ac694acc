"""LongSpec: lossless speculative decoding for long contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longspec.api import LongSpec, Stream
    from longspec.errors import UserError
    from longspec.generation import Generation
    from longspec.glide import LlamaGlide, Qwen2Glide

__version__ = "0.1.0"
__all__ = ["Generation", "LlamaGlide", "LongSpec", "Qwen2Glide", "Stream", "UserError", "__version__"]

_HOMES = {
    "LongSpec": "longspec.api",
    "Stream": "longspec.api",
    "Generation": "longspec.generation",
    "UserError": "longspec.errors",
    "LlamaGlide": "longspec.glide",
    "Qwen2Glide": "longspec.glide",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import on first use: `longspec --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'longspec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
