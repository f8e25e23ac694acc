"""Attention over the cache, behind one small interface."""

from longspec.attention.base import Attention, AttentionPlan, choose_backend, merge

__all__ = ["Attention", "AttentionPlan", "choose_backend", "merge"]
