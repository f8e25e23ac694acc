"""Which quantised checkpoints can be read, from the `quantization_config` of a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspec.config import Quantisation
from longspec.errors import UserError, shown

METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8")
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_KINDS = {"int": "int8", "float": "fp8"}
_STRATEGIES = ("tensor", "channel", "group", "block")


def read_quantisation(raw: Mapping[str, Any]) -> Quantisation | None:
    """How the checkpoint is quantised; None if it is not. What cannot be read is refused by name."""
    config = raw.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise UserError(f"the model config has quantization_config = {shown(config)}; an object is needed")
    method = config.get("quant_method", "unknown")
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method == "fbgemm_fp8":
        return Quantisation(method, "fp8")
    if method == "fp8":
        block = _block(config.get("weight_block_size"))
        return Quantisation(method, "fp8", block=block, suffix="_scale_inv")
    raise UserError(
        f"weights quantised with {shown(method)} are not supported; use {', '.join(METHODS)}, a GGUF or the "
        "original weights"
    )


def _compressed_tensors(config: Mapping[str, Any]) -> Quantisation:
    groups = config.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    schemes = [one.get("weights") if isinstance(one, Mapping) else None for one in groups]
    scheme = schemes[0] if schemes else None
    if not isinstance(scheme, Mapping):
        raise _unsupported("config_groups", config.get("config_groups"), "groups with weights")
    if any(other != scheme for other in schemes):
        raise _unsupported("config_groups", list(schemes), "weights that are all of one type")
    form, kind, strategy = config.get("format"), scheme.get("type", "int"), scheme.get("strategy")
    bits, ordering = scheme.get("num_bits"), scheme.get("actorder")
    if form not in _FORMATS:
        raise _unsupported("format", form, ", ".join(_FORMATS))
    if bits != 8 or kind not in _KINDS:
        raise _unsupported("weights", f"{bits}-bit {kind}", "8-bit int or float")
    if strategy not in _STRATEGIES:
        raise _unsupported("strategy", strategy, ", ".join(_STRATEGIES))
    if scheme.get("symmetric") is False:
        raise _unsupported("symmetric", False, "true")
    if ordering not in (None, False, "static", "weight"):
        raise _unsupported("actorder", ordering, "null or static")
    for name in ("sparsity_config", "transform_config"):
        other = config.get(name)
        if other and not (isinstance(other, Mapping) and other.get("format") == "dense"):
            raise _unsupported(name, other, "none")
    ignored = config.get("ignore") or []
    plain = tuple(one for one in ignored if isinstance(one, str))
    block = _block(scheme.get("block_structure")) if strategy == "block" else None
    packed = form == "pack-quantized"
    return Quantisation("compressed-tensors", _KINDS[kind], block, packed, plain)


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2:
        rows, columns = value
        if all(type(one) is int and 1 <= one <= 2**20 for one in value):
            return rows, columns
    raise UserError(f"quantization_config has blocks of {shown(value)}; two whole numbers are needed")


def _unsupported(name: str, value: object, supported: str) -> UserError:
    return UserError(
        f"compressed-tensors with {name} = {shown(value)} is not supported; supported: {supported}"
    )
