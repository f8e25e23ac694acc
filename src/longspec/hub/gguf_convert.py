"""Convert a `.gguf` file, once, into a folder in the Hugging Face layout.

Weights keep the file's type if all its matrices are F32, F16 or BF16. Quantised weights are expanded to
float32 if that takes at most 8 GB, so that nothing more is lost; otherwise to bfloat16. Vectors (norms,
biases) are float32. Memory is limited to one shard of 2 GB.
"""

import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspec.errors import UserError
from longspec.hub.cache import build_folder, cache_dir, require_space
from longspec.hub.gguf_config import ROPE_FREQS, Metadata, Weight, hf_config, special_ids, weight_plan
from longspec.hub.gguf_header import GGUFHeader, TensorInfo, damaged, read_header, shortened
from longspec.hub.gguf_tokenizer import save_tokenizer
from longspec.progress import Advance, count_bar

if TYPE_CHECKING:
    import numpy as np
    import torch

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_MAX_FLOAT32_BYTES = 8 * 10**9
_SHARD_BYTES = 2 * 10**9
_CHUNK_ELEMENTS = 1 << 24  # dequantised at a time: 64 MB of float32


def converted(path: Path, *, progress: bool = True) -> Path:
    """The folder with the converted `.gguf` file, made at first use and kept in the cache."""
    path = path.absolute()
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    key = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return build_folder(
        cache_dir() / "gguf" / f"{path.stem}-{key}", lambda folder: convert(path, folder, progress=progress)
    )


def read_gguf_config(path: Path) -> tuple[dict[str, Any], Mapping[str, int]]:
    """The model's shape as config.json will have it, and its `TargetFiles.matrix_types`, from the header."""
    meta, config, plan = _read(path)
    dtype = _storage_type(meta.header, plan)
    types = _matrix_types(meta.header, plan)
    if dtype != "float32":
        types = Counter({dtype: types.total()})
    return {"model_type": meta.arch} | config, types


def convert(path: Path, folder: Path, *, progress: bool = True) -> dict[str, Any]:
    """Write config, tokenizer and weights of a GGUF file into `folder`; returns their origin."""
    meta, config, plan = _read(path)
    header = meta.header
    dtype = _storage_type(header, plan)
    num_bytes = sum(_num_bytes(weight, dtype) for weight in plan)
    require_space(folder, num_bytes)
    _save_config(meta, config, dtype, folder)
    save_tokenizer(meta, folder)
    with count_bar(f"Converting {path.name}", num_bytes, progress, in_bytes=True) as advance:
        _save_weights(header, plan, dtype, folder, advance)
    stat = path.stat()
    return {
        "source": path.name,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "license": header.metadata.get("general.license"),
    }


def _read(path: Path) -> tuple[Metadata, dict[str, Any], list[Weight]]:
    meta = Metadata(read_header(path))
    if meta.integer("split.count", 1, low=0) > 1:
        raise meta.refuse("split GGUF files; join the parts first (llama-gguf-split --merge)")
    supported = (*_PLAIN, *_QUANTISED)
    for tensor in meta.header.tensors.values():
        if tensor.type_name not in supported:
            raise meta.refuse(
                f"the type {tensor.type_name} of tensor {tensor.name!r}; it reads {', '.join(supported)}"
            )
    config = hf_config(meta, _rope_freqs(meta.header))
    return meta, config, weight_plan(meta, config)


def _num_bytes(weight: Weight, dtype: str) -> int:
    """Vectors are always float32."""
    return math.prod(weight.shape) * (2 if len(weight.shape) == 2 and dtype != "float32" else 4)


def _storage_type(header: GGUFHeader, plan: list[Weight]) -> str:
    """The dtype of the matrices, as the module's docstring says."""
    kind, *others = _matrix_types(header, plan)
    if not others and kind in _PLAIN:
        return _PLAIN[kind]
    num_bytes = sum(_num_bytes(weight, "float32") for weight in plan)
    return "float32" if num_bytes <= _MAX_FLOAT32_BYTES else "bfloat16"


def _matrix_types(header: GGUFHeader, plan: list[Weight]) -> Counter[str]:
    """How many weights of matrices have each type."""
    counts = Counter[str]()
    for weight in plan:
        if len(weight.shape) == 2:
            counts[header.tensors[weight.gguf_name].type_name] += math.prod(weight.shape)
    return counts


def _save_config(meta: Metadata, config: dict[str, Any], dtype: str, folder: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig, Qwen2Config, Qwen3Config

    ids = special_ids(meta, config["vocab_size"])
    try:
        family = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[meta.arch]
        family(**config, **ids, dtype=dtype).save_pretrained(folder)
        GenerationConfig(**ids).save_pretrained(folder)
    except (ValueError, TypeError, KeyError) as error:  # the library's own checks of the values
        reason = shortened(str(error) or type(error).__name__)
        raise UserError(f"{meta.header.path}: its metadata does not describe a model ({reason})") from error


def _map(path: Path) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    import numpy as np

    return np.memmap(path, dtype=np.uint8, mode="r")


def _rope_freqs(header: GGUFHeader) -> list[float] | None:
    info = header.tensors.get(ROPE_FREQS)
    if info is None:
        return None
    if info.type_name != "F32" or len(info.shape) != 1 or info.shape[0] > 1 << 16:
        raise damaged(header.path, f"tensor {ROPE_FREQS!r} is not a float32 vector")
    values: list[float] = _dequantised(_map(header.path), info, "float32").tolist()
    return values


def _tensors(header: GGUFHeader, plan: list[Weight], dtype: str) -> "Iterator[tuple[Weight, torch.Tensor]]":
    data = _map(header.path)
    for weight in plan:
        info = header.tensors[weight.gguf_name]
        tensor = _dequantised(data, info, dtype if len(weight.shape) == 2 else "float32")
        if not all(bool(extreme.isfinite()) for extreme in tensor.aminmax()):
            raise damaged(header.path, f"tensor {info.name!r} has values that are not finite")
        if weight.num_heads:
            rows, columns = weight.shape
            pairs = tensor.view(weight.num_heads, rows // weight.num_heads // 2, 2, columns)
            tensor = pairs.transpose(1, 2).reshape(rows, columns)
        yield weight, tensor


def _dequantised(data: "np.ndarray[Any, np.dtype[np.uint8]]", info: TensorInfo, dtype: str) -> "torch.Tensor":
    """One tensor in the wanted dtype, expanded some rows at a time, so that all of it is never in float32."""
    import numpy as np
    import torch
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    out = torch.empty(info.shape, dtype=getattr(torch, dtype))
    num_rows = info.shape[0] if len(info.shape) == 2 else 1
    raw = data[info.offset : info.offset + info.num_bytes].reshape(num_rows, -1)
    flat = out.view(num_rows, -1)
    step = max(1, _CHUNK_ELEMENTS // flat.shape[1])
    with np.errstate(all="ignore"):  # damaged scales overflow; the caller checks for finite values
        for start in range(0, num_rows, step):
            rows = dequantize(raw[start : start + step], GGMLQuantizationType[info.type_name])
            flat[start : start + step] = torch.from_numpy(np.array(rows, dtype=np.float32))
    return out


def _save_weights(header: GGUFHeader, plan: list[Weight], dtype: str, folder: Path, advance: Advance) -> None:
    """Write the safetensors files, and their index if there are several."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards

    weights = {weight.hf_name: weight for weight in plan}
    kinds = {1: torch.float32, 2: getattr(torch, dtype)}
    shapes = {
        name: torch.empty(weight.shape, dtype=kinds[len(weight.shape)], device="meta")
        for name, weight in weights.items()
    }
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=_SHARD_BYTES)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    for file, names in split.filename_to_tensors.items():
        tensors = {}
        for weight, tensor in _tensors(header, [weights[name] for name in names], dtype):
            tensors[weight.hf_name] = tensor
            advance(tensor.nbytes)
        _save_file(tensors, folder / file)


def _save_file(tensors: "dict[str, torch.Tensor]", path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise UserError(
            f"cannot write weights to {path.parent.parent} ({shortened(str(error))});"
            " free some space or set LONGSPEC_CACHE to a folder with room"
        ) from error
    shutil.copymode(path.parent / "config.json", path)  # safetensors makes it private
