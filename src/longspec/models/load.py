"""Build a `Transformer` from the weights of a Hugging Face checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import torch
from torch import nn

from longspec.config import ModelConfig
from longspec.errors import UserError
from longspec.models.eight_bit import EightBit, EightBitLinear
from longspec.models.families import FAMILIES
from longspec.models.layers import Linear
from longspec.models.sharding import Shard
from longspec.models.stored import StoredWeights, TensorReader
from longspec.models.target import Transformer
from longspec.models.weights import Precision, pack


def load_target(
    config: ModelConfig,
    read: TensorReader,
    device: torch.device,
    precision: Precision | torch.dtype,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
    packed: bool = True,
    shard: Shard | None = None,
) -> Transformer:
    """Build a frozen target from the tensors that `read` gives, ready for inference.

    The matrices of each layer are packed or rounded as soon as they are read (`packed`), so that peak memory
    stays near the size of the model. Training needs plain matrices, because gradients pass through the head.
    Those of a quantised checkpoint are expanded, unless `precision` keeps them as they are stored. With
    `shard`, only that part of each tensor is read.
    """
    precision = Precision(precision) if isinstance(precision, torch.dtype) else precision
    with torch.device("meta"):
        model = Transformer(config if shard is None else config.shared_by(shard.size))
    model.requires_grad_(False).eval()
    # Not `to_empty`: on a meta tensor it makes torch import sympy, which takes a second.
    model.rope.table = torch.empty(model.rope.table.shape, dtype=torch.float32, device=device)
    stored = StoredWeights(read, config.quantisation)
    sources_of = dict(FAMILIES[config.family].weights(config))
    for block, names in groupby(sources_of, _block_of):
        for name in names:
            sources, num_values = sources_of[name], model.get_parameter(name).numel()
            if not (packed and _keep_stored(model, name, sources, stored, device, precision)):
                _take(model, name, sources, stored, device, precision, shard)
            on_progress(num_values * precision.dtype.itemsize)
        if packed and block:
            pack(model.get_submodule(block), precision)
    if config.tied_head:
        model.head.weight = model.embedding
    if packed:
        pack_ends(model, precision)
    if shard is not None:
        model.config = replace(model.config, vocab_size=config.vocab_size)
        shard.attach(model)
    return model


def pack_ends(model: Transformer, precision: Precision) -> None:
    """Pack or round the head and, where it is rounded, the embedding."""
    rounding = precision.rounding
    if precision.name or precision.kv_name:
        model.precision = precision
    if rounding is None:
        pack(model, precision)
        return
    if not isinstance(model.head, EightBitLinear):
        head = rounding.head(model.head)
        assert head is not None
        setattr(model, "head", head)  # noqa: B010 # another form of a Linear
    if rounding.table is not None:
        model.rounded_embedding = rounding.table(model.embedding.detach())
        model.embedding = nn.Parameter(model.embedding.detach()[:0].clone(), requires_grad=False)


def _keep_stored(
    model: Transformer,
    name: str,
    sources: tuple[str, ...],
    stored: StoredWeights,
    device: torch.device,
    precision: Precision,
) -> bool:
    """Take a matrix over in 8 bits, if the checkpoint stores it so, and `precision` and our kernels do."""
    matrix = stored.joined(sources) if precision.stored_kind is not None else None
    if matrix is None or matrix.values.dtype != precision.stored_kind or not matrix.fits_kernels:
        return False
    parent, _, _ = name.rpartition(".")
    linear = model.get_submodule(parent)
    assert isinstance(linear, Linear)
    _check_shape(name, sources, matrix.values.shape, linear.weight.shape)
    matrix = EightBit(matrix.values.to(device), matrix.scales.to(device))
    above, _, leaf = parent.rpartition(".")
    setattr(model.get_submodule(above), leaf, EightBitLinear(matrix, linear.bias, precision.dtype))
    return True


def _take(
    model: Transformer,
    name: str,
    sources: tuple[str, ...],
    stored: StoredWeights,
    device: torch.device,
    precision: Precision,
    shard: Shard | None,
) -> None:
    """Read a parameter, or the part of it that `shard` says."""
    cut = () if shard is None else (shard.cut(name),)
    parts = [stored.tensor(source, *cut) for source in sources]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    if shard is not None:
        tensor = shard.finished(name, tensor)
    _check_shape(name, sources, tensor.shape, model.get_parameter(name).shape)
    tensor = tensor.to(device=device, dtype=precision.dtype)
    if precision.rounding is not None and tensor.ndim == 1:
        tensor = tensor.clone()  # a view of the mapped file would keep all of it in memory
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))
    # The sum is one pass without a copy, and it is not finite if any value is not.
    if not math.isfinite(tensor.sum(dtype=torch.float32)):
        raise UserError(f"weight {sources[0]!r} has values that are not finite; fetch the weights again")


def _check_shape(name: str, sources: tuple[str, ...], found: torch.Size, shape: torch.Size) -> None:
    if found != shape:
        raise UserError(
            f"weight {sources[0]!r} gives shape {tuple(found)} where the config asks for "
            f"{tuple(shape)} ({name}); config.json and the weights do not belong together"
        )


def _block_of(name: str) -> str:
    """The block that a parameter belongs to, if any; the parameters of a block are read in a row."""
    return ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
