"""What vLLM's model runner knows of a step and does not pass to a proposer of another package."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspec.errors import UserError

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_NEEDED = ("sampled_token_ids", "sample_hidden_states", "spec_decode_metadata", "common_attn_metadata")


@dataclass(frozen=True)
class Step:
    """One step of the target, after its tokens were sampled."""

    runner: GPUModelRunner
    hidden: Tensor
    """The target's final hidden states where tokens were sampled, those of a request in a row, [n, E]."""
    num_drafted: Sequence[int] | None
    """How many tokens of each request were drafted; None: none of any."""
    common: CommonAttentionMetadata

    def feature(self, index: Sequence[int], sampled: Sequence[Sequence[int]]) -> Tensor:
        """The hidden states [B, E] at the newest verified token of the requests at `index`."""
        drafted = self.num_drafted or [0] * len(sampled)
        starts = [0]
        for count in drafted:
            starts.append(starts[-1] + count + 1)
        # The last token that was kept was sampled at the newest verified one.
        places = [starts[row] + len(sampled[row]) - 1 for row in index]
        return self.hidden[torch.tensor(places, device=self.hidden.device)]


def install() -> None:
    """Wrap the model runner's function that calls proposers, so that ours knows the step.

    It is done when the first proposer of ours is made, so a vLLM without a draft of ours is never touched.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = getattr(GPUModelRunner, "propose_draft_token_ids", None)
    if hasattr(original, "__wrapped__"):
        return
    signature = None if original is None else inspect.signature(original)
    missing = [name for name in _NEEDED if signature is None or name not in signature.parameters]
    if original is None or signature is None or missing:
        raise UserError(
            "this vLLM does not fit longspec: GPUModelRunner.propose_draft_token_ids has no "
            + ", ".join(missing)
        )
    GPUModelRunner.propose_draft_token_ids = _handing_over(original, signature)


def _handing_over(original: Any, signature: inspect.Signature) -> Any:
    @functools.wraps(original)
    def propose_draft_token_ids(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        from longspec.vllm.proposer import DraftProposer

        drafter = self.drafter
        if not isinstance(drafter, DraftProposer):
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        metadata = given["spec_decode_metadata"]
        drafter.step = Step(
            self,
            given["sample_hidden_states"],
            None if metadata is None else metadata.num_draft_tokens,
            given["common_attn_metadata"],
        )
        try:
            return original(self, *args, **kwargs)
        finally:
            drafter.step = None  # it holds this step's tensors

    return propose_draft_token_ids
