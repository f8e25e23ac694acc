"""`Qwen2Glide` under its published path."""

from longspec.glide import Qwen2Glide

__all__ = ["Qwen2Glide"]
