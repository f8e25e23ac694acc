"""The draft: one decoder layer that also reads the target's KV cache (GLIDE)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longspec.config import DraftConfig, ModelConfig
from longspec.errors import UserError, reason_of
from longspec.models.eight_bit import EightBitLinear, form_of
from longspec.models.layers import (
    PLAIN,
    FeedForward,
    Linear,
    LinearForm,
    Ops,
    Reader,
    RMSNorm,
    Rope,
    Stream,
    look_up,
    scores,
)
from longspec.models.native_linears import NativeLinear, packed
from longspec.models.rope import rotate
from longspec.models.sharding import shared_rows
from longspec.models.target import Transformer


class SelfPass(Protocol):
    """How the draft attends to its own tokens."""

    @property
    def ops(self) -> Ops: ...

    def attend_self(self, qkv: Tensor) -> Tensor:
        """Add the keys and values of the projection [B, T, (H + 2 K) D] to the draft's window, and attend to
        it; returns [B, T, H D]."""
        ...


class CrossPass(Protocol):
    """How the draft attends to the target's KV."""

    @property
    def ops(self) -> Ops: ...

    def attend_cross(self, queries: Tensor) -> Tensor:
        """Attend to the target's KV of all cross layers, as far as the lag allows; queries and result are
        [B, T, C H D]."""
        ...


class DraftPass(SelfPass, CrossPass, Protocol):
    """What the draft's queries attend to in decoding; plain and fused decoding each have a class."""


class GlideDraft(nn.Module):
    """Self-attention over its own tokens, cross-attention over the target's cache, feed-forward.

    It uses the target's embedding and head. Its keys and values depend only on token and position, because
    the target's hidden state enters after self-attention. So the entries of its cache are never stale.
    """

    vocab_ids: Tensor | None
    recompute_levels = False
    """Whether the backward pass of training computes each level again. Then only one level at a time takes
    memory."""

    def __init__(self, target: ModelConfig, config: DraftConfig) -> None:
        super().__init__()
        self.target_config, self.config = target, config
        E, D = target.hidden_size, target.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = target.num_heads, target.num_kv_heads, D
        self.num_cross = len(config.layers_of(target))
        num_qkv = (target.num_heads + 2 * target.num_kv_heads) * D
        self.self_norm = RMSNorm(E, target.rms_eps)
        self.qkv = Linear(E, num_qkv, config.qkv_bias)
        self.self_output = Linear(target.num_heads * D, E)
        self.feature = Linear(E, E) if config.use_feature else None
        self.parent_norm = RMSNorm(E, target.rms_eps) if config.use_parent else None
        self.parent = Linear(E, E) if config.use_parent else None
        # 1-D, so that Muon treats it as a vector.
        gates = config.max_lag * E if config.lag_gate else 0
        self.lag_scale = nn.Parameter(torch.ones(gates)) if gates else None
        self.lag_shift = nn.Parameter(torch.zeros(gates)) if gates else None
        self.cross_norm = RMSNorm(E, target.rms_eps)
        self.cross_q = Linear(E, self.num_cross * target.num_heads * D, config.qkv_bias)
        self.cross_output = Linear(self.num_cross * target.num_heads * D, E)
        self.ffn_norm = RMSNorm(E, target.rms_eps)
        self.ffn = FeedForward(E, config.ffn_size(target))
        self.final_norm = RMSNorm(E, target.rms_eps) if config.final_norm else None
        if config.draft_vocab > target.vocab_size:
            raise UserError(
                f"draft_vocab {config.draft_vocab} exceeds the target's {target.vocab_size} tokens"
            )
        # Not on the meta device: there torch would import sympy for arange, which takes a second.
        ids = torch.arange(config.draft_vocab, device="cpu")
        self.register_buffer("vocab_ids", ids if config.draft_vocab else None)

    @classmethod
    def from_pretrained(cls, path: str | PathLike[str], target: Transformer, target_name: str) -> GlideDraft:
        """Read a draft for this target: from one of our folders, a published one, a .pth file or the hub."""
        from longspec.hub import resolve_draft
        from longspec.models.draft_files import load_draft

        return load_draft(resolve_draft(fspath(path)), target, target_name).draft

    def save_pretrained(
        self,
        folder: str | PathLike[str],
        target: Transformer,
        target_name: str,
        acceptance: dict[str, Any] | None = None,
    ) -> None:
        """Write `config.json` and `model.safetensors`, with a fingerprint of the target."""
        from longspec.models.draft_files import Fingerprint, save_draft

        save_draft(self, Path(folder), Fingerprint.of(target), target_name, acceptance)

    def push_to_hub(
        self,
        hub_id: str,
        target: Transformer,
        target_name: str,
        acceptance: dict[str, Any] | None = None,
        private: bool = False,
    ) -> str:
        """Save to a repository of the Hugging Face hub, which is created if needed; returns its address."""
        from huggingface_hub import HfApi

        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, target, target_name, acceptance)
            api = HfApi()
            try:
                repository = api.create_repo(hub_id, private=private, exist_ok=True)
                api.upload_folder(repo_id=hub_id, folder_path=folder, commit_message="Draft by longspec")
            except Exception as error:  # no login, network or rights: the hub's client says which
                raise UserError(f"cannot push the draft to {hub_id}: {reason_of(error)}") from error
        return str(repository)

    def initialise(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Draw new weights: small normal matrices, zero biases, unit norms, gates near the identity."""
        for module in self.modules():
            if isinstance(module, Linear):
                nn.init.normal_(module.weight, std=std, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        if self.lag_scale is not None and self.lag_shift is not None:
            nn.init.normal_(self.lag_scale, 1.0, std, generator=generator)
            nn.init.normal_(self.lag_shift, 0.0, std, generator=generator)

    def heads(self, qkv: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, D], keys and values [B, T, K, D] of self-attention's projection."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), 2)
        q, k = rotate(qk, *rope).split((self.num_heads, self.num_kv_heads), 2)
        return q, k, v

    def cross_heads(self, queries: Tensor, rope: Rope) -> Tensor:
        """The queries of cross-attention [B, T, C H D], rotated, as [B, T, C H, D]."""
        return rotate(queries.unflatten(-1, (-1, self.head_dim)), *rope)

    def forward(
        self,
        x: Tensor,
        own: SelfPass,
        asked: Tensor,
        levels: Sequence[tuple[Tensor | None, Tensor, CrossPass]],
    ) -> list[Tensor]:
        """Hidden states [R, 1, E] at each level, for training.

        x [B, T, E] are embedded tokens, and `asked` [R] the rising flat indices of those whose hidden states
        are needed. A level is a feature, lags and a pass. The feature [R, 1, E] is the target's final hidden
        state at each query's newest verified token, which is `lags`, int64 [1] or [R], positions before the
        query. The levels of a draft that reads its parents are those of lags 1, 2, ...: a query's parent is
        the query of the token before it, one level up.
        """
        out = own.attend_self(self.enter(x, own.ops))  # the same at every lag
        x, out = (one.flatten(0, 1)[asked][:, None] for one in (x, out))
        found: list[Tensor] = []
        for level in levels:
            given = (x, out, found[-1] if found else None, *level)
            if self.recompute_levels and torch.is_grad_enabled():
                again: Tensor = checkpoint(self._level, *given, use_reentrant=False, preserve_rng_state=False)
                found.append(again)
            else:
                found.append(self._level(*given))
        return found

    def _level(
        self,
        x: Tensor,
        out: Tensor,
        above: Tensor | None,
        feature: Tensor | None,
        lags: Tensor,
        run: CrossPass,
    ) -> Tensor:
        """Hidden states at one level; `out` is self-attention's result, `above` those of the level above."""
        queries, stream = self.query(self.enter_level(x, above, feature, lags), out, run.ops)
        return self.finish(stream, run.attend_cross(queries), run.ops)

    def enter_level(self, x: Tensor, above: Tensor | None, feature: Tensor | None, lags: Tensor) -> Tensor:
        """The embedded tokens x [R, 1, E] with what features and parents add to them, for training."""
        added = self.project_feature(feature, lags)
        stream = x if added is None else x + added
        if above is None or self.parent_reader is None:
            return stream
        # The first token of a span gets a wrong parent, because the token before it is not asked. No query
        # that counts is changed: before each of those, as many tokens are asked as there are levels above.
        parents = F.pad(above[:-1], (0, 0, 0, 0, 1, 0))
        return stream + PLAIN.normed_linear(self.parent_reader, parents)[0]

    def read(self, x: Stream, stream: Stream, run: DraftPass) -> Tensor:
        """Hidden states [B, T, E] for the head.

        x is the embedded tokens; all of them get keys and values. `stream` is x plus `project_feature`, for
        only those tokens whose hidden states are needed.
        """
        out = run.attend_self(self.enter(x, run.ops))
        queries, stream = self.query(stream, out, run.ops)
        return self.finish(stream, run.attend_cross(queries), run.ops)

    def enter(self, x: Stream, ops: Ops) -> Tensor:
        """Norm x and project it to queries, keys and values of self-attention."""
        return ops.normed_linear(self.reader, x)[0]

    def query(self, stream: Stream, out: Tensor, ops: Ops) -> tuple[Tensor, Stream]:
        """Compute the queries of cross-attention, [B, T, C H D], from self-attention's result."""
        cross = (self.cross_norm, self.cross_q)
        return ops.normed_linear(cross, ops.add_linear(self.self_output, out, stream, cross))

    def finish(self, stream: Stream, out: Tensor, ops: Ops) -> Tensor:
        """Compute what the head reads from cross-attention's result."""
        stream = ops.add_linear(self.cross_output, out, stream, (self.ffn_norm, self.ffn.gate_up))
        return ops.finish(ops.feed_forward(self.ffn, self.ffn_norm, stream, None), self.final_norm)

    @property
    def reader(self) -> Reader:
        """The norm and projection that read the embedded tokens."""
        return self.self_norm, self.qkv

    @property
    def parent_reader(self) -> Reader | None:
        """The norm and projection that read a parent's hidden state; None if the draft does not use it."""
        return None if self.parent_norm is None or self.parent is None else (self.parent_norm, self.parent)

    def project_feature(self, feature: Tensor | None, lags: Tensor | None = None) -> Tensor | None:
        """What the target's hidden state [B, T or 1, E] adds to the stream; None if the draft does not use
        it.

        The newest verified token is `lags`, int64 [B] or [1], positions before the query.
        """
        if self.feature is None:
            return None
        assert feature is not None, "this draft needs the target's hidden state"
        projected: Tensor = self.feature(feature)
        if (gates := self._gates()) is None:
            return projected
        assert lags is not None, "this draft has lag gates, so it needs the lags"
        scale, shift = (gate[lags - 1] for gate in gates)
        return torch.addcmul(shift, projected, scale)

    def features(self, feature: Tensor, depth: int) -> list[Tensor | None]:
        """What the target's hidden state [B, 1, E] adds to the stream at each of `depth` levels of a tree."""
        projected = None if self.feature is None else self.feature(feature)
        if projected is None or (gates := self._gates()) is None:
            return [projected] * depth
        scale, shift = (gate[:depth, None] for gate in gates)
        return list(torch.addcmul(shift, projected, scale).unbind(0))

    def _gates(self) -> tuple[Tensor, Tensor] | None:
        """Scale and shift of each lag, [max_lag, 1, E]; None if the draft has no gates."""
        if self.lag_scale is None or self.lag_shift is None:
            return None
        shape = (self.config.max_lag, 1, -1)
        return self.lag_scale.view(shape), self.lag_shift.view(shape)


class DraftHead(nn.Module):
    """The target's head for the draft: all of its rows, or those of the draft's vocabulary."""

    def __init__(self, target: Transformer, vocab_ids: Tensor | None, form: LinearForm | None = None) -> None:
        super().__init__()
        self._target = (target,)  # in a tuple, so that torch does not register it as a submodule
        self.vocab_ids = vocab_ids
        self.vocabulary = frozenset(() if vocab_ids is None else vocab_ids.tolist())
        self.rows: nn.Module | None = None
        head: nn.Module = target.head
        kept = head if isinstance(head, EightBitLinear) and form == form_of(head) else None
        if vocab_ids is None and (form is None or kept is not None):
            return
        if vocab_ids is not None and kept is not None and target.shard is None:
            self.rows = kept.with_rows(vocab_ids.to(target.device))
            return
        if vocab_ids is None:
            plain = target.head.weight_rows(None).detach()
        else:
            plain = _head_rows(target, vocab_ids.to(target.device)).detach()
            plain = plain if target.shard is None else target.shard.own_rows(plain)
        rows = Linear(plain.shape[1], len(plain))
        rows.weight = nn.Parameter(plain, requires_grad=False)
        self.rows = None if form is None else form(rows)
        if self.rows is None and vocab_ids is not None:
            self.rows = packed(rows)

    @cached_property
    def token_ids(self) -> Tensor:
        """The token id of each score, int64 [V']."""
        if self.vocab_ids is not None:
            return self.vocab_ids
        target = self._target[0]
        return torch.arange(target.config.vocab_size, device=target.device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Scores [..., V'] in fp32."""
        target = self._target[0]
        if self.rows is None:
            return target.logits(hidden)
        return target.joined(scores(self.rows, hidden), len(self.token_ids))

    def in_context(self, tokens: Iterable[int]) -> DraftHead | ContextHead:
        """This head; for a reduced head on a CPU, also with the rows of the context's own `tokens`."""
        target = self._target[0]
        if self.vocab_ids is None or target.device.type != "cpu":  # on a GPU shapes must stay fixed
            return self
        if target.config.tied_head:
            return ContextHead(self, partial(look_up, target.table), tokens)
        head: nn.Module = target.head
        if isinstance(head, Linear | NativeLinear):
            return ContextHead(self, partial(_head_rows, target), tokens)
        return self  # single rows of other forms cannot be read


def _head_rows(target: Transformer, ids: Tensor) -> Tensor:
    """These rows of the target's head. If ranks share it, every rank gets all of these rows."""
    if (shard := target.shard) is None:
        return target.head.weight_rows(ids)
    return shared_rows(target.head.weight_rows, shard.each(shard.whole.vocab_size), ids, shard)


class ContextHead:
    """A reduced head, plus rows for tokens that it lacks but that occur in the context.

    Texts repeat their own words. The head grows with the text, so each request has its own.
    """

    # To read this many fp32 rows takes about as long as to read an int8 head of 8,192 rows.
    MOST = 1024

    def __init__(self, head: DraftHead, read_rows: Callable[[Tensor], Tensor], tokens: Iterable[int]) -> None:
        """`read_rows` returns the rows of the target's head for these tokens."""
        self.head, self._read_rows = head, read_rows
        self._extra: set[int] = set()
        self.rows_of_context = read_rows(torch.empty(0, dtype=torch.int64)).float()
        self.token_ids = head.token_ids
        self.add(tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """Add the rows of those `tokens` that are missing, while there is room."""
        lacking = (token for token in dict.fromkeys(tokens) if token not in self.head.vocabulary)
        room = self.MOST - len(self._extra)
        fresh = [token for token in lacking if token not in self._extra][:room]
        if fresh:
            ids = torch.tensor(fresh)
            self._extra.update(fresh)
            self.rows_of_context = torch.cat((self.rows_of_context, self._read_rows(ids).float()))
            self.token_ids = torch.cat((self.token_ids, ids))

    def __call__(self, hidden: Tensor) -> Tensor:
        scores = self.head(hidden)
        if not self._extra:
            return scores
        return torch.cat((scores, F.linear(hidden.float(), self.rows_of_context)), -1)
