"""A draft on disk: a folder with config.json and model.safetensors, or the published forms."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from longspec.atomic import write_whole
from longspec.config import DraftConfig, ModelConfig
from longspec.errors import UserError, shown
from longspec.models.checkpoint import open_file
from longspec.models.draft import GlideDraft
from longspec.models.sharding import Shard
from longspec.models.target import Transformer
from longspec.records import as_record, read_record

ARCHITECTURE = "glide"
# In the published code a query sees its own position and the 512 before it, and the depth is not limited.
PUBLISHED = DraftConfig(window=513, max_lag=64)
PUBLISHED_FILE = "draft_model_weights.pth"
_SAMPLES = 256


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the target that a draft was trained for."""

    shape: dict[str, Any]
    dtype: str
    weights: list[float]

    @classmethod
    def of(cls, target: Transformer) -> Fingerprint:
        """The target's shape, and sample values of its embedding and norms."""
        norms = [weight for name, weight in target.named_parameters() if name.endswith("norm.weight")]
        # A target that is rounded or shared is known by its norms alone.
        is_plain = target.rounded_embedding is None and target.shard is None
        return cls.sampled(target.whole_config, target.dtype, target.embedding if is_plain else None, norms)

    @classmethod
    def sampled(
        cls, config: ModelConfig, dtype: torch.dtype, embedding: Tensor | None, norms: Sequence[Tensor]
    ) -> Fingerprint:
        """The same, from the weights themselves; the norms in the order of `Transformer`'s parameters."""
        samples = [] if embedding is None else [_spread(embedding, _SAMPLES)]
        samples += [_spread(norm, 8) for norm in norms]
        weights = torch.cat(samples).float().tolist() if samples else []
        return cls(_shape_of(config), str(dtype).removeprefix("torch."), weights)

    def same_weights(self, other: Fingerprint) -> bool:
        """Whether the sample values agree within the precision of the coarser dtype."""
        steps = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}
        step = max(steps.get(self.dtype, 2**-7), steps.get(other.dtype, 2**-7))
        num_norms = min(len(self.weights), len(other.weights))
        if abs(len(self.weights) - len(other.weights)) not in (0, _SAMPLES):
            return False
        ours, theirs = (torch.tensor(one.weights[-num_norms:]) for one in (self, other))
        return torch.allclose(ours, theirs, rtol=step, atol=1e-6)


def _shape_of(config: ModelConfig) -> dict[str, Any]:
    names = ("family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
    return {name: getattr(config, name) for name in (*names, "num_kv_heads", "head_dim")}


def _spread(weight: Tensor, count: int) -> Tensor:
    flat = weight.detach().flatten()
    return flat[torch.linspace(0, len(flat) - 1, count, device=flat.device, dtype=torch.float64).long()]


Share = Annotated[float, Field(ge=0, le=1)]
# The numbers are bounded, because each becomes a loop of a round or a row of a table.
_TREE = r"^[1-9][0-9]{0,3}(,[1-9][0-9]{0,3}){0,63}(/[1-9][0-9]{0,3})?(\+[1-9][0-9]?)?$"


class AcceptanceTable(TypedDict, total=False):
    """Measured acceptance: `auto` plans with it (`longspec.decoding.expected`)."""

    chain: Annotated[list[Share], Field(max_length=512)]
    trees: dict[Annotated[str, Field(pattern=_TREE)], Annotated[list[Share], Field(max_length=512)]]


@dataclass(frozen=True)
class LoadedDraft:
    """A draft and what its folder says about it."""

    draft: GlideDraft
    acceptance: dict[str, Any]
    """As `AcceptanceTable`; empty if it was not measured."""


def published_names(config: DraftConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Our parameter names, each with the published names whose rows it joins; for reading and writing."""
    kinds = ("weight", "bias") if config.qkv_bias else ("weight",)
    for kind in kinds:
        yield f"qkv.{kind}", tuple(f"self_attn.{name}_proj.{kind}" for name in "qkv")
        yield f"cross_q.{kind}", (f"cross_attn.q_proj.{kind}",)
    yield "self_output.weight", ("self_attn.o_proj.weight",)
    yield "cross_output.weight", ("cross_attn.o_proj.weight",)
    yield "ffn.gate_up.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    yield "ffn.down.weight", ("mlp.down_proj.weight",)
    yield "self_norm.weight", ("input_layernorm.weight",)
    yield "cross_norm.weight", ("post_self_attention_layernorm.weight",)
    yield "ffn_norm.weight", ("post_cross_attention_layernorm.weight",)
    if config.use_feature:
        yield "feature.weight", ("feature_proj.weight",)
    if config.use_parent:
        yield "parent_norm.weight", ("parent_norm.weight",)
        yield "parent.weight", ("parent_proj.weight",)
    if config.lag_gate:
        yield "lag_scale", ("lag_scale",)
        yield "lag_shift", ("lag_shift",)
    if config.final_norm:
        yield "final_norm.weight", ("norm.weight",)
    if config.draft_vocab:
        yield "vocab_ids", ("vocab_ids",)


def draft_tensors(draft: GlideDraft) -> dict[str, Tensor]:
    """The draft's weights under the published names."""
    named = dict(draft.named_parameters()) | dict(draft.named_buffers())
    target = draft.target_config
    heads, kv_heads = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    tensors: dict[str, Tensor] = {}
    for ours, theirs in published_names(draft.config):
        sizes = [heads, kv_heads, kv_heads] if len(theirs) == 3 else len(theirs) * [-1]
        whole = named[ours].detach()
        parts = whole.split(sizes) if len(theirs) == 3 else whole.chunk(len(theirs))
        tensors |= {name: part.contiguous().cpu() for name, part in zip(theirs, parts, strict=True)}
    return tensors


def save_draft(
    draft: GlideDraft,
    folder: Path,
    fingerprint: Fingerprint,
    target_name: str,
    acceptance: dict[str, Any] | None = None,
) -> None:
    """Write the folder. Each file appears complete or not at all."""
    from safetensors.torch import save

    config = {
        "architecture": ARCHITECTURE,
        "target": target_name,
        "fingerprint": asdict(fingerprint),
        "draft": asdict(draft.config),
        "acceptance": acceptance or {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "model.safetensors", save(draft_tensors(draft), {"format": "pt"}))
    write_whole(folder / "config.json", json.dumps(config, indent=1).encode())


@dataclass(frozen=True)
class DraftRecord:
    """What a draft's `config.json` holds."""

    architecture: str
    fingerprint: Fingerprint
    draft: dict[str, Any]
    """The fields of `DraftConfig`; a newer version may have more of them."""
    target: str | None = None
    acceptance: AcceptanceTable | None = None


def load_draft(path: Path, target: Transformer, target_name: str) -> LoadedDraft:
    """Read a draft for this target from one of our folders, a published one, or a bare .pth file."""
    loaded = load_draft_for(path, target.whole_config, Fingerprint.of(target), target_name, target.shard)
    loaded.draft.to(device=target.device, dtype=target.dtype)
    return loaded


def load_draft_for(
    path: Path, target: ModelConfig, fingerprint: Fingerprint, target_name: str, shard: Shard | None = None
) -> LoadedDraft:
    """The same for a target of which only the shape and a fingerprint are known; on the CPU, as it is stored.
    With `shard`, only that part of each weight.

    `fingerprint` has no weights if they cannot be compared.
    """
    record = read_draft_record(path)
    if record is not None:
        _check_target(path, record, fingerprint, target_name)
    config = read_draft_config(path)
    tensors = read_tensors(path)
    draft = _build(path, tensors, config, target, shard)
    for name, tensor in draft.named_parameters():
        if not torch.isfinite(tensor).all():
            warnings.warn(
                f"the draft {path} has values in {name} that are not finite: answers stay correct but slow",
                stacklevel=2,
            )
            break
    return LoadedDraft(draft, dict(record.acceptance or {}) if record else {})


def read_draft_config(path: Path) -> DraftConfig:
    """The architecture of a draft, without its weights."""
    record = read_draft_record(path)
    if record is None:
        return PUBLISHED
    names = {field.name for field in fields(DraftConfig)}
    unknown = next((name for name in record.draft if name not in names), None)
    if unknown is not None:
        raise UserError(
            f"the draft {path} uses {shown(unknown)}, which this version does not know; update longspec"
        )
    return as_record(record.draft, DraftConfig, f"cannot read {path / 'config.json'}: draft")


def draft_config_for(path: Path, target: ModelConfig, target_name: str) -> DraftConfig:
    """The same; a draft that was trained for a target of another shape is refused."""
    record = read_draft_record(path)
    if record is not None:
        _check_shape(path, record, _shape_of(target), target_name)
    return read_draft_config(path)


def read_draft_record(path: Path) -> DraftRecord | None:
    """The content of config.json; None if the draft is not in our format."""
    file = path / "config.json"
    if not (path.is_dir() and file.is_file()):
        return None
    if read_record(file, dict[str, Any]).get("architecture") != ARCHITECTURE:
        return None
    return read_record(file, DraftRecord)


def _check_target(path: Path, record: DraftRecord, here: Fingerprint, target_name: str) -> None:
    _check_shape(path, record, here.shape, target_name)
    if here.weights and not record.fingerprint.same_weights(here):
        warnings.warn(
            f"the draft {path} was trained for {_trained_for(record)}; {target_name} has the same shape "
            "but other weights: answers stay correct, but fewer tokens may be accepted",
            stacklevel=2,
        )


def _check_shape(path: Path, record: DraftRecord, here: dict[str, Any], target_name: str) -> None:
    known = record.fingerprint.shape
    for name, value in here.items():
        if known.get(name) != value:
            raise UserError(
                f"the draft {path} was trained for {_trained_for(record)}, not for {target_name}: "
                f"{name} is {shown(known.get(name), quoted=False)} there and {value} here"
            )


def _trained_for(record: DraftRecord) -> str:
    return shown(record.target or "another target", quoted=False)


def read_tensors(path: Path) -> dict[str, Tensor]:
    file = path
    if path.is_dir():
        candidates = ("model.safetensors", PUBLISHED_FILE, "pytorch_model.bin")
        found = next((path / name for name in candidates if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"the draft folder {path} has none of {', '.join(candidates)}")
        file = found
    with ExitStack() as stack:
        tensors = open_file(file, stack)
        return {name.removeprefix("draft_model."): tensors.tensor(name) for name in tensors.names}


def _build(
    path: Path, tensors: dict[str, Tensor], config: DraftConfig, target: ModelConfig, shard: Shard | None
) -> GlideDraft:
    with torch.device("meta"):  # so that a config that asks for huge weights is refused before allocation
        shapes = GlideDraft(target, config).state_dict()
    state, num_cross = {}, len(config.layers_of(target))
    for ours, theirs in published_names(config):
        missing = next((name for name in theirs if name not in tensors), None)
        if missing is not None:
            raise UserError(f"the draft {path} has no weight {missing!r}")
        try:
            state[ours] = torch.cat([tensors[name] for name in theirs])
        except RuntimeError as error:
            raise UserError(f"the draft {path}: {', '.join(theirs)} do not fit together") from error
        expected = shapes[ours].shape
        if state[ours].shape != expected:
            raise UserError(
                f"the draft {path} does not fit the target: {theirs[0]!r} gives shape "
                f"{tuple(state[ours].shape)} where {tuple(expected)} is needed"
            )
        if shard is not None:
            state[ours] = torch.cat([shard.draft_part(ours, tensors[name], num_cross) for name in theirs])
    if shard is not None:
        # The draft may still propose any token.
        target = replace(target.shared_by(shard.size), vocab_size=target.vocab_size)
        config = config.shared_by(shard.size)
    draft = GlideDraft(target, config)
    draft.load_state_dict(state)
    return draft
