"""Plain batched generation for throughput: a fixed batch of rows, refilled as rows finish.

The target's own forward pass decodes one token of every row at a time; on a GPU it is captured once in a
CUDA graph. Which job goes into which row, and when, follows from token counts alone, and the noise of a row
from (its job's seed, position): the same jobs give the same tokens on the same device with the same batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.attention.base import AttentionPlan, copies_whole
from longspec.attention.torch_backend import TorchAttention
from longspec.cache import KVCache
from longspec.decoding.choose import uniform
from longspec.decoding.graph import capture
from longspec.models.target import Transformer

# Prompts are prefilled for so many jobs at a time, in parts of so many tokens, padding included.
_GROUP = 64
_PREFILL_TOKENS = 8192
# On a GPU the host looks at the rows every so many tokens, and refills when one row in so many is free.
_STEPS = 16
_FREE_SHARE = 32
# Tokens of the vocabulary whose weights are added up before a draw.
_CHUNK = 128
_ALIGN = 64


@dataclass(frozen=True)
class Job:
    """One text to continue."""

    key: int
    """The caller's name for it."""
    prompt: list[int]
    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    seed: int
    """Of the noise, any int64."""


@dataclass(frozen=True)
class Written:
    """A job that is done: its new tokens, the one that ended it included."""

    job: Job
    tokens: list[int]
    ended: bool
    """By an end token rather than by its limit."""


@dataclass(frozen=True)
class _Prefilled:
    """A job whose prompt is computed: row `index` of tokens and a cache that a group shares."""

    job: Job
    tokens: Tensor
    cache: KVCache
    index: int


class Writer:
    """A target and a batch of rows of `capacity` tokens each."""

    def __init__(
        self,
        target: Transformer,
        batch: int,
        capacity: int,
        ends: Iterable[int],
        fused: bool | None = None,
    ) -> None:
        """`fused` asks for our own kernels; left out, they are used on a GPU, for heads that they take."""
        if fused is None:
            fused = target.device.type == "cuda" and copies_whole(target.config.head_dim, target.dtype)
        self._target, self._batch, self.capacity = target, batch, -(-capacity // _ALIGN) * _ALIGN
        self._fused = fused
        target.attention = BatchAttention(fused)
        device = target.device
        self._cache = _token_major_cache(target, batch, self.capacity)
        self._tokens = torch.zeros(batch, self.capacity, dtype=torch.int64, device=device)
        self._limits = torch.zeros(batch, dtype=torch.int64, device=device)
        self._seeds = torch.zeros_like(self._limits)
        self._temperatures = torch.zeros(batch, device=device)
        self._active = torch.zeros(batch, dtype=torch.bool, device=device)
        self._end_set = frozenset(ends)
        self._ends = torch.tensor(sorted(self._end_set), dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        # Looking at the rows costs a CPU nothing, and idle rows cost it time.
        self._steps, self._least_free = (
            (_STEPS, max(1, batch // _FREE_SHARE)) if device.type == "cuda" else (1, 1)
        )

    @torch.inference_mode()
    def write(self, jobs: Iterable[Job]) -> Iterator[Written]:
        """Do the jobs, in order; yields each one when it is done.

        What the caller does with a result overlaps with the GPU's work on the next tokens.
        """
        waiting, ready = iter(jobs), deque[_Prefilled]()
        running, done = dict[int, Job](), dict[int, Written]()
        free = list(range(self._batch))
        self._stop(free)
        while True:
            if len(free) >= self._least_free or not running:
                self._prefill(waiting, ready, len(free))
                free = self._place(ready, free, running)
            if not running:
                yield from done.values()
                return
            self._advance()
            # Behind the tokens that were just asked for, and ahead of the rows that will be free after them.
            self._prefill(waiting, ready, self._least_free)
            yield from done.values()
            done = self._collect(running)
            running = {row: job for row, job in running.items() if row not in done}
            free += done
            self._stop(list(done))

    def _prefill(self, waiting: Iterator[Job], ready: deque[_Prefilled], num_rows: int) -> None:
        """Have at least `num_rows` jobs ready, while there are any: all but the last token of each prompt.

        Jobs are taken in groups of a fixed size, so that a result does not depend on when a row was free.
        """
        while len(ready) < num_rows and (group := list(islice(waiting, _GROUP))):
            group.sort(key=lambda job: len(job.prompt))  # those of like length together: little is padded
            while group:
                take = max(1, _PREFILL_TOKENS // len(group[0].prompt))
                while take > 1 and take * len(group[min(take, len(group)) - 1].prompt) > _PREFILL_TOKENS:
                    take -= 1
                part, group = group[:take], group[take:]
                longest = len(part[-1].prompt)
                padded = self._send([job.prompt + [0] * (longest - len(job.prompt)) for job in part])
                cache = self._target.new_cache(len(part), longest - 1)
                if longest > 1:
                    self._target(padded[:, :-1], cache)
                ready.extend(_Prefilled(job, padded, cache, index) for index, job in enumerate(part))

    def _place(self, ready: deque[_Prefilled], free: list[int], running: dict[int, Job]) -> list[int]:
        """Put what is ready into free rows; returns the rows that are left."""
        while ready and free:
            cache = ready[0].cache
            taken: list[_Prefilled] = []
            while ready and ready[0].cache is cache and len(taken) < len(free):
                taken.append(ready.popleft())
            rows, free = free[: len(taken)], free[len(taken) :]
            part = slice(taken[0].index, taken[-1].index + 1)
            self._fill(rows, [one.job for one in taken], taken[0].tokens[part], cache, part)
            running |= {row: one.job for row, one in zip(rows, taken, strict=True)}
        return free

    def _fill(self, rows: list[int], jobs: list[Job], tokens: Tensor, cache: KVCache, part: slice) -> None:
        where, longest = self._send(rows), tokens.shape[1]
        # What stands past a shorter prompt is overwritten before it is read.
        self._cache.keys[:, where, :, : longest - 1] = cache.keys[:, part]
        self._cache.values[:, where, :, : longest - 1] = cache.values[:, part]
        self._tokens[where, :longest] = tokens
        lengths = [len(job.prompt) for job in jobs]
        limits = [n + job.max_new_tokens for n, job in zip(lengths, jobs, strict=True)]
        assert max(limits) <= self.capacity, "a job must fit"
        numbers = self._send([lengths, limits, [job.seed for job in jobs]])
        self._cache.lengths[where] = numbers[0] - 1
        self._limits[where], self._seeds[where] = numbers[1], numbers[2]
        self._temperatures[where] = self._send([job.temperature for job in jobs])
        self._active[where] = True

    def _stop(self, rows: list[int]) -> None:
        """Free rows attend to nothing, which costs little."""
        if rows:
            where = self._send(rows)
            self._active[where] = False
            self._cache.lengths[where] = 0

    def _send(self, values: list[Any]) -> Tensor:
        """Numbers on the device; from pinned memory, since other copies wait for all that is queued."""
        made = torch.tensor(values)
        return made.pin_memory().to(self._tokens.device, non_blocking=True) if self._tokens.is_cuda else made

    def _advance(self) -> None:
        """Decode a few tokens of every row; on a GPU, without waiting for them."""
        if self._tokens.device.type == "cuda" and self._graph is None:
            self._capture()
        for _ in range(self._steps):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()

    def _capture(self) -> None:
        """Record one step. The steps that warm up and record run with every row at rest."""
        active = self._active.clone()
        self._active.zero_()
        self._graph = capture(self._step, self._tokens.device)
        self._active.copy_(active)

    def _step(self) -> None:
        """One token of every row. Fixed shapes and no question to the host, so that it can be captured."""
        lengths = self._cache.lengths
        newest = self._tokens.gather(1, lengths[:, None])
        hidden = self._target(newest, self._cache)[:, 0]
        chosen = self._draw(self._target.logits(hidden), lengths + 1)
        place = (lengths + 1).clamp_(max=self.capacity - 1)[:, None]
        kept = torch.where(self._active[:, None], chosen[:, None], self._tokens.gather(1, place))
        self._tokens.scatter_(1, place, kept)
        self._cache.advance(self._active)
        ended = (chosen[:, None] == self._ends).any(-1)
        self._active &= ~ended & (lengths + 1 < self._limits)

    def _draw(self, logits: Tensor, positions: Tensor) -> Tensor:
        if self._fused:
            from longspec.kernels.draw import draw_tokens

            return draw_tokens(logits, self._temperatures, self._seeds, positions)
        return draw(logits, self._temperatures, self._seeds, positions)

    def _collect(self, running: dict[int, Job]) -> dict[int, Written]:
        """The rows that are done."""
        active, lengths = torch.stack((self._active.long(), self._cache.lengths)).tolist()
        rows = sorted(row for row in running if not active[row])
        if not rows:
            return {}
        longest = max(lengths[row] for row in rows) + 1
        texts = self._tokens[self._send(rows), :longest].tolist()
        found = {}
        for row, text in zip(rows, texts, strict=True):
            job = running[row]
            tokens = text[len(job.prompt) : lengths[row] + 1]
            found[row] = Written(job, tokens, tokens[-1] in self._end_set)
        return found


def _token_major_cache(target: Transformer, batch: int, capacity: int) -> KVCache:
    """A cache that lies in memory as [L, B, S, K, D], as flash attention over rows of any length asks."""
    config = target.config
    shape = (config.num_layers, batch, capacity, config.num_kv_heads, config.head_dim)
    # Zeros, for what a mask hides is multiplied by 0 nevertheless.
    keys, values = (torch.zeros(shape, device=target.device, dtype=target.dtype) for _ in range(2))
    lengths = torch.zeros(batch, dtype=torch.int64, device=target.device)
    return KVCache(keys.transpose(2, 3), values.transpose(2, 3), lengths)


def draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The token of each row, int64 [B], by inverting the distribution at one uniform of (seed, position).

    Temperatures [B] are the rows' own; 0 is greedy. logits [B, V], fp32, are used up. Where `choose` hashes
    every token, so that a draft can share the noise, one hash per row is enough here, and 49k times cheaper.
    """
    best, greedy = logits.max(-1)
    warm = temperatures.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    if logits.shape[1] % _CHUNK:
        logits = F.pad(logits, (0, -logits.shape[1] % _CHUNK), value=-torch.inf)
    weights = logits.sub_(best[:, None]).div_(warm).exp_().view(logits.shape[0], -1, _CHUNK)
    # First the chunk, then the token in it: sums of few terms lose nothing of a large vocabulary's tail.
    sums = weights.sum(-1).double()
    up_to = sums.cumsum(-1)
    uniforms = uniform(seeds, positions, torch.zeros_like(seeds))[:, None]
    goal = uniforms * up_to[:, -1:]
    chunk = (up_to <= goal).sum(-1, keepdim=True).clamp_(max=sums.shape[1] - 1)
    within = weights.gather(1, chunk[:, :, None].expand(-1, -1, _CHUNK))[:, 0].double().cumsum(-1)
    rest = goal - (up_to.gather(1, chunk) - sums.gather(1, chunk))
    # Rounding must not carry it out of the chunk, to a token without any weight.
    rest = torch.minimum(rest.clamp_(min=0), within[:, -1:] * (1 - 2.0**-40))
    drawn = chunk[:, 0] * _CHUNK + (within <= rest).sum(-1)
    return torch.where(temperatures > 0, drawn, greedy)


@dataclass(frozen=True, kw_only=True)
class _BatchPlan(AttentionPlan):
    ends: Tensor
    """How many keys each row sees, int32 [B]."""
    used: int | None
    """An upper bound of them where the host knows one."""


class BatchAttention(TorchAttention):
    """All rows in one call, lengths read on the device: for decoding, and for prefills of empty rows.

    Nothing is merged here, so the lse that `attend` returns is empty.
    """

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self._fused = fused

    def fuses(self, x: Tensor) -> bool:
        """See `Attention.fuses`."""
        return self._fused

    def plan(
        self,
        lengths: Tensor,
        num_new: int,
        tree: Tensor | None = None,
        sinks: int = 0,
        window: int | None = None,
    ) -> AttentionPlan:
        """See `Attention.plan`. With more than one new token, the rows' prefixes must be empty."""
        assert tree is None, "only chains are written here"
        assert window is None, "all of a row's keys are seen here"
        ends = (lengths + num_new).to(torch.int32)
        used = int(ends.max()) if lengths.device.type == "cpu" else None
        return _BatchPlan(lengths, num_new, None, ends=ends, used=used)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        assert isinstance(plan, _BatchPlan)
        none = q.new_empty(0)
        if plan.num_new > 1:
            k, v = k[:, :, : plan.num_new], v[:, :, : plan.num_new]
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2), none
        if self._fused:
            from longspec.kernels.attention import attend

            return attend(q, k, v, plan.lengths)
        B, _, H, D = q.shape
        folded = q.view(B, k.shape[1], -1, D)
        if q.is_cuda and q.dtype != torch.float32 and D % 8 == 0 and D <= 256:
            return _flash_rows(folded, k, v, plan.ends).view(B, 1, H, D), none
        k, v = k[:, :, : plan.used], v[:, :, : plan.used]
        sees = torch.arange(k.shape[2], device=q.device) < plan.ends[:, None]
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=sees[:, None, None])
        return out.reshape(B, 1, H, D), none


def _flash_rows(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """Queries [B, K, G, D] over the first `ends` [B] of the keys [B, K, S, D], which lie token by token.

    The query heads of a KV head are the queries of a sequence; each row reads its own keys and no others.
    """
    B, K, G, D = q.shape
    S = k.shape[2]
    rows = torch.arange(B + 1, dtype=torch.int32, device=q.device)
    flat_q = q.transpose(1, 2).reshape(B * G, K, D)
    flat_k, flat_v = (part.transpose(1, 2).view(B * S, K, D) for part in (k, v))
    kernel = torch.ops.aten._flash_attention_forward
    out = kernel(flat_q, flat_k, flat_v, rows * G, rows * S, G, S, 0.0, False, False, seqused_k=ends)[0]
    return out.view(B, G, K, D).transpose(1, 2).reshape(B, K * G, D)
