"""torch.compile for training on a GPU: it fuses what is between the attention kernels."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from longspec.models.draft import GlideDraft
from longspec.models.layers import Block
from longspec.models.target import Transformer
from longspec.train.losses import Chunk, one_chunk


def compile_layers(target: Transformer, draft: GlideDraft) -> Chunk:
    """Replace parts of the layers by compiled ones; returns a compiled `one_chunk`.

    Weights are inputs of a compiled part, so all layers of the target share one compilation.
    """
    # It only says which of two equally right kernels the compiler chose.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    for block in target.blocks:
        assert isinstance(block, Block)
        _compile(block, "enter", "leave")
        _compile(block.attention, "heads")
    _compile(draft, "enter", "heads")
    # Every batch asks the draft at another number of tokens; for the second one, torch compiles again for any
    # number. With dynamic=True no width would be fixed either, and kernels would divide by widths, slowly.
    _compile(draft, "enter_level", "query", "cross_heads", "finish", dynamic=None)
    return torch.compile(one_chunk)


def _compile(module: nn.Module, *names: str, dynamic: bool | None = False) -> None:
    for name in names:
        part: Any = torch.compile(getattr(module, name), dynamic=dynamic)
        setattr(module, name, part)
