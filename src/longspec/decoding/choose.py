"""Choosing the next token: a pure function of the logits, the settings, the seed and the position.

Sampling is Gumbel-max. The noise of a token is a hash of (seed, position, token id), so the batch and the
drafted tokens cannot change the choice at a position. Therefore every decoding method emits the same text for
the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from longspec.decoding.native_round import choose_tokens, is_native
from longspec.decoding.sampling import Sampling


@dataclass(frozen=True)
class SamplingRows:
    """The sampling settings of B rows, on the device; see `Sampling`."""

    temperature: Tensor
    """fp32 [B]"""
    top_k: Tensor
    """int64 [B]"""
    top_p: Tensor
    """fp32 [B]"""
    min_p: Tensor
    """fp32 [B]"""
    penalty: Tensor
    """fp32 [B], the repetition penalty"""
    seen: Tensor
    """Tokens that occurred in each row's text, bool [B, V]; complete only for rows with a penalty."""

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device) -> SamplingRows:
        """Rows that are all greedy."""
        zeros, ones = (torch.full((num_rows,), one, dtype=torch.float32, device=device) for one in (0.0, 1.0))
        seen = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=device)
        return cls(zeros, zeros.long(), ones, zeros.clone(), ones.clone(), seen)

    @classmethod
    def of(cls, settings: Sequence[Sampling], vocab_size: int, device: torch.device) -> SamplingRows:
        """Rows with these settings that have seen nothing yet."""
        rows = cls.empty(len(settings), vocab_size, device)
        rows.put(torch.arange(len(settings), device=device), settings)
        return rows

    def put(self, rows: Tensor, settings: Sequence[Sampling]) -> None:
        """Give rows [n] these settings, and clear what they have seen."""
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "top_k")
        values = [[min(getattr(one, name), 2**31) for one in settings] for name in names]
        numbers = torch.tensor(values, dtype=torch.float32, device="cpu")
        numbers[1].clamp_(min=torch.finfo(torch.float32).tiny)  # the best token is always kept
        if rows.is_cuda:
            # From pinned memory, because other copies wait for all queued work.
            numbers = numbers.pin_memory().to(rows.device, non_blocking=True)
        parts = (self.temperature, self.top_p, self.min_p, self.penalty, self.top_k)
        for part, values in zip(parts, numbers, strict=True):
            part[rows] = values.to(part.dtype)
        self.seen.index_fill_(0, rows, False)

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def without_penalty(self) -> SamplingRows:
        """The same settings, but no repetition penalty."""
        return replace(self, penalty=torch.ones_like(self.penalty))

    def at(self, rows: Tensor) -> SamplingRows:
        """Copies of these rows, int64 [n]."""
        return SamplingRows(*(part[rows] for part in self.tensors()))

    def first(self, num_rows: int) -> SamplingRows:
        """The first rows, sharing the memory."""
        return SamplingRows(*(part[:num_rows] for part in self.tensors()))


def choose(
    logits: Tensor,
    sampling: SamplingRows,
    seeds: Tensor,
    positions: Tensor,
    sampled: bool,
    seen: Tensor | None = None,
) -> Tensor:
    """The token of each row, int64 [B].

    logits [B, V] are the target's scores, fp32. seeds and positions, int64 [B], are the row's seed and the
    place in the text of the token to choose. If not `sampled`, every row is greedy without a penalty.
    seen, bool [B, V], marks the tokens that occurred before; the default is `sampling.seen`.
    """
    if is_native(logits):
        given = sampling if seen is None else replace(sampling, seen=seen)
        return choose_tokens(logits, given, seeds, positions, sampled)
    if not sampled:
        return logits.argmax(-1)
    scores = filtered(logits, sampling, seen)
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    # At temperature 0 the best score is 0 and the others are -inf, so noise changes nothing.
    return (scores.double() + gumbel(seeds, positions, tokens)).argmax(-1)


def filtered(logits: Tensor, sampling: SamplingRows, seen: Tensor | None = None) -> Tensor:
    """The scores [B, V] whose softmax is the distribution to sample from; removed tokens are at -inf.

    A greedy row keeps only the best token; of equal ones, the first.
    """
    seen, penalty = sampling.seen if seen is None else seen, sampling.penalty[:, None]
    scores = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    best = scores.argmax(-1, keepdim=True)
    # Relative to the row's best score, so that a tiny temperature cannot cause an overflow.
    warm = sampling.temperature[:, None].clamp(min=torch.finfo(scores.dtype).tiny)
    scores = (scores - scores.gather(-1, best)) / warm
    size = scores.shape[-1]
    kept = torch.where((sampling.top_k > 0) & (sampling.top_k < size), sampling.top_k, size)
    if _needed(kept < size):
        ordered = scores.sort(-1, descending=True).values
        scores = scores.masked_fill(scores < ordered.gather(-1, kept[:, None] - 1), -torch.inf)
    if _needed(sampling.top_p < 1):
        scores = _keep_top_p(scores, sampling.top_p[:, None])
    scores = scores.masked_fill(scores < sampling.min_p.log()[:, None], -torch.inf)
    alone = torch.full_like(scores, -torch.inf).scatter_(-1, best, 0.0)
    return torch.where(sampling.temperature[:, None] > 0, scores, alone)


def _needed(rows: Tensor) -> bool:
    """Whether any of `rows` is set. Always True on a GPU, because reading the answer would wait for it."""
    return rows.is_cuda or bool(rows.any())


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Keep the tokens above the largest threshold that leaves a total probability of top_p [B, 1]; 1 is off.

    Positive floats have the same order as their bit patterns. So bisecting the patterns finds the threshold
    exactly, in 30 sums (no probability has a higher bit). This is faster than a sort.
    """
    probabilities = scores.softmax(-1)
    patterns = probabilities.view(torch.int32)
    enough = torch.zeros_like(patterns[..., :1])
    for bit in reversed(range(30)):
        candidate = enough | (1 << bit)
        kept = torch.where(patterns >= candidate, probabilities, 0.0).sum(-1, keepdim=True)
        enough = torch.where(kept >= top_p, candidate, enough)
    return scores.masked_fill((patterns < enough) & (top_p < 1), -torch.inf)


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise [R, V] in fp64 for the token ids [V] at (seed, position), each int64 [R].

    The largest noise comes from the smallest uniform numbers. 52 bits behind the point, and log1p, keep these
    numbers apart, also for the unlikely tokens of a large vocabulary.
    """
    return uniform(seeds[:, None], positions[:, None], tokens).neg_().log1p_().neg_().log_().neg_()


def uniform(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), fp64, for each (seed, position, token), broadcast."""
    bits = hash_bits(seeds, positions, tokens)
    return ((bits >> 12) & (2**52 - 1)).double().add_(0.5).mul_(2.0**-52)


def derived(seeds: Tensor, stream: Tensor | int) -> Tensor:
    """Seeds for another stream of noise, which is independent of the noise of `seeds`."""
    # The product wraps around in a tensor, so it must wrap around for a Python number too.
    moved = _signed(stream * _SECOND % 2**64) if isinstance(stream, int) else stream * _SECOND
    return _mix(_mix(seeds + _FIRST) + moved)


def hash_bits(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """64 well-mixed bits for each (seed, position, token), broadcast; the same on every device, because only
    integers are computed."""
    key = _mix(_mix(seeds + _GOLDEN) ^ (positions * _GOLDEN))
    return _mix(key + tokens * _GOLDEN)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64, whose products wrap around."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """A logical shift to the right; torch's is arithmetic."""
    return (x >> by) & ((1 << (64 - by)) - 1)
