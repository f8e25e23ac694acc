"""`LlamaGlide` under its published path."""

from longspec.glide import LlamaGlide

__all__ = ["LlamaGlide"]
