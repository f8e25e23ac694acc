"""Cross-attention over the target's pages, by the attention backend that vLLM uses for the target."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspec.errors import UserError
from longspec.models.draft import GlideDraft
from longspec.vllm.chain import CrossAttention

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def check_target(config: VllmConfig) -> None:
    """Refuse what the draft cannot read yet."""
    parallel = config.parallel_config
    sizes = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
    }
    for name, size in sizes.items():
        if size > 1:
            raise UserError(f"{name} is {size}; a longspec draft needs 1 in this version")
    cache_dtype = config.cache_config.cache_dtype
    if cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        raise UserError(
            f"kv_cache_dtype is {cache_dtype!r}; a longspec draft needs one that is not quantised"
        )


class PagedCross:
    """Reads the KV of the target's layers where vLLM keeps it. A pass of the target is never disturbed."""

    def __init__(self, config: VllmConfig, draft: GlideDraft) -> None:
        found = config.compilation_config.static_forward_context
        wanted = draft.config.layers_of(draft.target_config)
        names = {layer: f"model.layers.{layer}.self_attn.attn" for layer in wanted}
        missing = [name for name in names.values() if name not in found]
        if missing:
            raise UserError(f"this vLLM does not fit longspec: its target has no layer {missing[0]!r}")
        self._names, self._layers = names, {layer: found[name] for layer, name in names.items()}
        for name, layer in zip(names.values(), self._layers.values(), strict=True):
            backend = layer.get_attn_backend()
            if getattr(backend, "forward_includes_kv_cache_update", True):
                raise UserError(
                    f"the attention backend {backend.get_name()} of {name} writes KV when it attends; "
                    "choose another one (--attention-backend)"
                )
        self._num_ranks = config.parallel_config.tensor_parallel_size
        self._groups: dict[int, Any] = {}

    def bind(self, runner: GPUModelRunner) -> None:
        """Find the layers' attention groups, which vLLM makes when it allocates its KV cache."""
        if not self._groups:
            self._groups = {layer: _group_of(runner, name) for layer, name in self._names.items()}

    @property
    def can_capture(self) -> bool:
        """Whether one plan serves all batches of a size: FlashAttention's reads lengths and pages on the
        device, others' are made on the host. Ranks talk to each other outside of graphs only."""
        return self._num_ranks == 1 and all(
            layer.get_attn_backend().get_name() == "FLASH_ATTN" for layer in self._layers.values()
        )

    def over(self, table: Tensor, lengths: Tensor, longest: int) -> CrossAttention:
        """Attention of one query a row over pages [B, M] as far as `lengths`, int32 [B]. None is longer than
        `longest`."""
        batch = _one_query_each(table, lengths, longest)
        plans: dict[int, Any] = {}
        for group in self._groups.values():
            if id(group) not in plans:
                plans[id(group)] = _plan(group, batch)

        def cross(layer: int, q: Tensor) -> Tensor:
            module, plan = self._layers[layer], plans[id(self._groups[layer])]
            q = self._own_heads(q).contiguous()
            # Keys and values are those in the cache; what is passed for new ones is not read.
            new, out = q[:, : module.num_kv_heads], torch.empty_like(q)
            module.impl.forward(module, q, new, new, module.kv_cache, plan, out)
            return self._all_heads(out)

        return cross

    def _own_heads(self, q: Tensor) -> Tensor:
        """Of the query heads [B, H, D], those whose keys are on this rank."""
        if self._num_ranks == 1:
            return q
        from vllm.distributed import get_tensor_model_parallel_rank

        return q.chunk(self._num_ranks, 1)[get_tensor_model_parallel_rank()]

    def _all_heads(self, out: Tensor) -> Tensor:
        """The results of all ranks' heads, [B, H, D]."""
        if self._num_ranks == 1:
            return out
        from vllm.distributed import tensor_model_parallel_all_gather

        whole: Tensor = tensor_model_parallel_all_gather(out, 1)
        return whole


def _group_of(runner: GPUModelRunner, name: str) -> Any:
    """The attention group that a layer belongs to. vLLM tells proposers the pages of the first KV cache group
    only."""
    found = next((group for group in runner.attn_groups[0] if name in group.layer_names), None)
    if found is None:
        raise UserError(f"{name} is not in the first KV cache group; longspec drafts need a target with one")
    return found


def _one_query_each(table: Tensor, lengths: Tensor, longest: int) -> CommonAttentionMetadata:
    """A batch with one query a row: as its last entry, so that it sees all of them."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    count, device = len(table), table.device
    starts = torch.arange(count + 1, dtype=torch.int32)
    known = {field.name for field in fields(CommonAttentionMetadata)}
    bound = {"seq_lens_cpu_upper_bound": torch.full((count,), longest, dtype=torch.int32)}
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=count,
        num_actual_tokens=count,
        max_query_len=1,
        max_seq_len=longest,
        block_table_tensor=table,
        slot_mapping=torch.zeros(count, dtype=torch.int64, device=device),  # nothing is written
        **{name: value for name, value in bound.items() if name in known},
    )


def _plan(group: Any, common: CommonAttentionMetadata) -> Any:
    """The backend's own form of a batch."""
    if hasattr(group, "build_metadata_for_drafting"):
        return group.build_metadata_for_drafting(common, 0)
    return group.get_metadata_builder().build_for_drafting(common_attn_metadata=common, draft_index=0)
