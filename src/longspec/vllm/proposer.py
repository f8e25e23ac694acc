"""The proposer that vLLM makes: it drafts a chain for each request from the target's own KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspec.errors import UserError
from longspec.models.families import config_from_hf
from longspec.models.layers import pack_linears
from longspec.models.rope import RopeTable
from longspec.vllm.chain import Parts, Roots, draft_chain, read_text
from longspec.vllm.cross import PagedCross, check_target
from longspec.vllm.handover import Step, install
from longspec.vllm.ring import BatchRing, RingRows
from longspec.vllm.settings import SECTION
from longspec.vllm.target import choose_with, load_for

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
        num_rows = vllm_config.scheduler_config.max_num_seqs
        self._rows = RingRows(num_rows)
        self._parts: Parts | None = None
        self._cross: PagedCross | None = None
        self.step: Step | None = None
        """What the model runner knows of this step."""

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft, and allocate its ring: now, so that vLLM counts both when it sizes its KV cache."""
        model_config = self._config.model_config
        device, dtype = next(target_model.parameters()).device, model_config.dtype
        draft = load_for(self._folder, self._target, target_model, model_config.model)
        draft.to(device=device, dtype=dtype).requires_grad_(False).eval()
        choose = choose_with(target_model, draft.vocab_ids)
        pack_linears(draft)
        rope = RopeTable(self._target.rope, self._target.head_dim).to(device)
        rope.reserve(model_config.max_model_len + self._num_tokens + 1)
        num_rows = self._config.scheduler_config.max_num_seqs
        ring = BatchRing(self._target, draft.config, num_rows, self._num_tokens, device, dtype)
        self._parts = Parts(draft, rope, ring, target_model.embed_input_ids, choose)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray[Any, Any],
        token_ids_cpu: np.ndarray[Any, Any],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """The chain behind each request's newest token; nothing for a request whose prompt is not complete."""
        step, parts = self.step, self._parts
        assert step is not None
        assert parts is not None
        drafted: list[list[int]] = [[] for _ in sampled_token_ids]
        index = [row for row, tokens in enumerate(sampled_token_ids) if tokens]
        if not index:
            return drafted
        if self._cross is None:
            self._cross = PagedCross(self._config, parts.draft, step.runner)
        positions = [int(num_tokens_no_spec[row]) - 1 for row in index]
        roots = self._roots(parts, step, index, positions, sampled_token_ids, token_ids_cpu)
        cross = self._cross.at(step.common, index, positions)
        chains = draft_chain(parts, roots, self._num_tokens, cross).tolist()
        for row, chain in zip(index, chains, strict=True):
            drafted[row] = chain
        return drafted

    def _roots(
        self,
        parts: Parts,
        step: Step,
        index: list[int],
        positions: list[int],
        sampled: Sequence[Sequence[int]],
        text: np.ndarray[Any, Any],
    ) -> Roots:
        """The newest token of each request, and a few before it that the ring may lack. Where it lacks more,
        after a prompt or a prefix that was found in the cache, that is read here."""
        requests = [step.runner.input_batch.req_ids[row] for row in index]
        rows = self._rows.assign(requests, step.runner.requests)
        device, width = parts.ring.keys.device, self._num_tokens + 1
        num_unread, tokens = [], []
        for request, ring_row, row, root in zip(requests, rows, index, positions, strict=True):
            first = max(self._rows.num_read(request, root), root - parts.ring.window + 1)
            if root + 1 - first > width:
                read_text(parts, ring_row, torch.from_numpy(text[row, first:root].astype("int64")).to(device), first)
                first = root
            num_unread.append(root + 1 - first)
            tokens.append([int(text[row, max(root - back, 0)]) for back in range(width)])
            self._rows.note_read(request, root)
        whole = (torch.tensor(values, device=device) for values in (rows, positions, tokens, num_unread))
        return Roots(*whole, step.feature(index, sampled))


def _draft_folder(vllm_config: VllmConfig) -> Path:
    section = vllm_config.additional_config.get(SECTION) if isinstance(vllm_config.additional_config, dict) else None
    if not isinstance(section, dict) or "draft" not in section:
        raise UserError(
            'the draft is not named: pass --speculative-config \'{"method": "longspec", "model": DRAFT}\''
        )
    return Path(section["draft"])
