"""The proposer that vLLM makes: it drafts a chain for each request from the target's own KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspec.errors import UserError
from longspec.models.families import config_from_hf
from longspec.models.layers import replace_linears
from longspec.models.native_linears import packed
from longspec.models.rope import RopeTable
from longspec.vllm.captured import CapturedChains, Work
from longspec.vllm.chain import ChainParts, CrossAttention, Roots, draft_chain
from longspec.vllm.cross import PagedCross, check_target
from longspec.vllm.handover import Step, install
from longspec.vllm.ring import BatchRing, RingRows
from longspec.vllm.roots import DraftedRequests, find_roots
from longspec.vllm.settings import SECTION
from longspec.vllm.target import ServedTarget, choose_with, load_for

if TYPE_CHECKING:
    import numpy as np
    from vllm.config import VllmConfig


class DraftProposer:
    """vLLM's `custom_class` proposer, plus what vLLM does not pass to such a class (`handover`)."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.speculative_config is not None
        install()
        check_target(vllm_config)
        self._config = vllm_config
        self._num_tokens = vllm_config.speculative_config.num_speculative_tokens
        self._folder = _draft_folder(vllm_config)
        self._target = config_from_hf(vllm_config.model_config.hf_config)
        self._rows = RingRows(vllm_config.scheduler_config.max_num_seqs)
        self._parts: ChainParts | None = None
        self._cross: PagedCross | None = None
        self._captured: CapturedChains | None = None
        eager = vllm_config.speculative_config.enforce_eager
        self._eager = vllm_config.model_config.enforce_eager if eager is None else eager
        self.step: Step | None = None
        """What the model runner knows of this step."""

    def load_model(self, target_model: ServedTarget) -> None:
        """Load the draft, and allocate its ring: now, so that vLLM counts both when it sizes its KV cache."""
        model_config = self._config.model_config
        device, dtype = next(target_model.parameters()).device, model_config.dtype
        draft = load_for(self._folder, self._target, target_model, model_config.model)
        draft.to(device=device, dtype=dtype).requires_grad_(False).eval()
        choose = choose_with(target_model, draft.vocab_ids)
        replace_linears(draft, packed)
        rope = RopeTable(self._target.rope, self._target.head_dim).to(device)
        rope.reserve(model_config.max_model_len + self._num_tokens + 1)
        num_rows = self._config.scheduler_config.max_num_seqs
        ring = BatchRing(self._target, draft.config, num_rows, self._num_tokens, device, dtype)
        self._parts = ChainParts(draft, rope, ring, target_model.embed_input_ids, choose)
        self._cross = PagedCross(self._config, draft)
        self._captured = self._make_captured(self._parts, self._cross)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray[Any, Any],
        token_ids_cpu: np.ndarray[Any, Any],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """The chain behind each request's newest token; nothing while its prompt is not complete."""
        step, parts = self.step, self._parts
        assert step is not None
        assert parts is not None
        drafted: list[list[int]] = [[] for _ in sampled_token_ids]
        index = [row for row, tokens in enumerate(sampled_token_ids) if tokens]
        if not index:
            return drafted
        positions = [int(num_tokens_no_spec[row]) - 1 for row in index]
        names = [step.runner.input_batch.req_ids[row] for row in index]
        texts = [token_ids_cpu[row] for row in index]
        drafting = DraftedRequests(names, texts, positions, step.feature(index, sampled_token_ids))
        roots = find_roots(parts, self._rows, drafting, step.runner.requests, self._num_tokens)
        table = step.common.block_table_tensor
        if index != list(range(len(table))):
            table = table[torch.tensor(index, device=table.device)]
        chains = self._draft(parts, step, roots, table, max(positions)).tolist()
        for row, chain in zip(index, chains, strict=True):
            drafted[row] = chain
        return drafted

    def _draft(self, parts: ChainParts, step: Step, roots: Roots, table: Tensor, longest: int) -> Tensor:
        assert self._cross is not None
        self._cross.bind(step.runner)
        if self._captured is not None:
            return self._captured(roots, table)
        cross = self._cross.over(table, roots.positions.to(torch.int32), longest)
        return draft_chain(parts, roots, self._num_tokens, cross)

    def _make_captured(self, parts: ChainParts, cross: PagedCross) -> CapturedChains | None:
        """None where chains are launched one operation after the other."""
        device, longest = parts.ring.keys.device, self._config.model_config.max_model_len
        if device.type != "cuda" or self._eager or not cross.can_capture:
            return None
        pool = torch.cuda.graph_pool_handle()

        def record(work: Work) -> Work:
            from longspec.engine.graph import capture

            return capture([work], device, pool)[0].replay

        def over(table: Tensor, lengths: Tensor) -> CrossAttention:
            return cross.over(table, lengths, longest)

        return CapturedChains(parts, self._num_tokens, over, record)


def _draft_folder(vllm_config: VllmConfig) -> Path:
    given = vllm_config.additional_config
    section = given.get(SECTION) if isinstance(given, dict) else None
    if not isinstance(section, dict) or "draft" not in section:
        raise UserError(
            'the draft is not named: pass --speculative-config \'{"method": "longspec", "model": DRAFT}\''
        )
    return Path(section["draft"])
