"""Measure acceptance as in decoding, but without decoding.

In text that the target wrote greedily, a drafted token is accepted if and only if it is the next token of the
text, and a chain continues only after accepted tokens. So one pass of the draft per lag over the whole text
shows what every possible round would accept, and a walk through it gives the rounds of real decoding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longspec.atomic import write_whole
from longspec.data.collate import collate
from longspec.data.shards import Packed, Role
from longspec.decoding.methods import VANILLA
from longspec.engine.make import make_engine
from longspec.engine.memory import kv_bytes
from longspec.engine.sequence import Sequence
from longspec.errors import UserError
from longspec.models.target import Transformer
from longspec.records import read_record
from longspec.train.layout import head_rows, lay_out
from longspec.train.losses import score
from longspec.train.objective import Objective

# How many held-out prompts are continued at once.
_ROWS = 64


@dataclass(frozen=True)
class Continuation:
    """A prompt and the target's answer."""

    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of a greedy chain."""

    chain: list[float]
    """The share of rounds that accept the token at depth 1, 2, ..."""
    tau: float


def prompts_of(sequences: Many[Packed], num_tokens: int) -> list[list[int]]:
    """The beginnings of held-out sequences: the whole question if there is one, else `num_tokens`."""
    prompts = []
    for one in sequences:
        end = int(one.starts[1]) if len(one.starts) > 1 else len(one.tokens)
        if one.roles[0] == Role.PROMPT:
            end = min(end, int(np.argmax(one.roles != Role.PROMPT)) or end)
        else:
            end = min(end, num_tokens)
        prompts.append(one.tokens[:end].tolist())
    return prompts


def continuations(
    target: Transformer, prompts: list[list[int]], num_tokens: int, eos_ids: frozenset[int]
) -> list[Continuation]:
    """Let the target continue each prompt greedily. If it is sharded, all processes must do this together."""
    texts = [Sequence(prompt, num_tokens, eos_ids=eos_ids, method=VANILLA) for prompt in prompts]
    longest, num_rows = max(text.limit for text in texts), min(len(texts), _ROWS)
    # Not by the free memory, because all processes must do the same work in the same order.
    pages = kv_bytes(target.config, target.dtype, num_rows, longest)
    with _uncompiled():
        engine = make_engine(target, max_length=longest, max_rows=num_rows, kv_memory=pages)
        for _ in engine.run_each(texts):
            pass
    return [Continuation(text.prompt, text.tokens) for text in texts]


def _uncompiled() -> AbstractContextManager[object]:
    """A context without compilation. Layers compiled for training would be compiled again for each of many
    shapes, and after a few of them torch compiles nothing more, not even for training."""
    return torch.compiler.set_stance("force_eager")


def save_continuations(path: Path, texts: list[Continuation]) -> None:
    write_whole(path, json.dumps([asdict(text) for text in texts]).encode())


def load_continuations(path: Path, vocab_size: int) -> list[Continuation]:
    found = read_record(path, list[Continuation])
    if not all(0 <= token < vocab_size for text in found for token in (*text.prompt, *text.tokens)):
        raise UserError(f"{path} has tokens outside the target's vocabulary of {vocab_size}: remove it")
    return found


@torch.no_grad()
def chain_acceptance(objective: Objective, texts: Many[Continuation], gamma: int) -> Acceptance:
    """Accepted tokens per depth and tau of a greedy chain on these texts."""
    rounds = kept = 0
    accepted = np.zeros(gamma, np.int64)
    for text in texts:
        with _uncompiled():
            hits = _hits(objective, text, gamma)
        root, last = len(text.prompt), len(text.prompt) + len(text.tokens) - 1
        kept += last - root
        while root < last:
            depth = 0
            while depth < gamma and root + depth < last and hits[depth][root + depth]:
                depth += 1
            rounds += 1
            accepted[:depth] += 1
            root += depth + 1
    return Acceptance((accepted / max(rounds, 1)).tolist(), kept / max(rounds, 1))


def _hits(objective: Objective, text: Continuation, gamma: int) -> list[list[bool]]:
    """For each lag up to gamma and each token, whether the draft would predict the next one."""
    ids, begin, answer = objective.draft.vocab_ids, len(text.prompt), torch.tensor(text.tokens[1:])
    found = []
    for _, scores in answer_scores(objective, text, range(1, gamma + 1)):
        best = scores.argmax(-1)
        right = (best if ids is None else ids[best]) == answer.to(best)
        found.append([False] * begin + right.tolist() + [False])
    return found


def answer_scores(
    objective: Objective, text: Continuation, lags: Iterable[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each lag, the scores [n - 1, V'] that the target and the draft give to the tokens of the draft's
    head, at all n tokens of an answer but the last."""
    tokens = np.array(text.prompt + text.tokens)
    roles = np.full(len(tokens), Role.TEXT, np.uint8)
    roles[: len(text.prompt)] = Role.PROMPT
    whole = Packed(tokens, roles, np.zeros(1, np.int32))
    target, draft = objective.target, objective.draft
    # Scores are wanted also where the draft cannot propose the next token.
    every = head_rows(None, target.config.vocab_size)
    # A parent is one lag below its child, so all lags up to the largest are needed.
    lags = list(lags)
    by_level = [[lag] for lag in range(1, max(lags) + 1)]
    layout = lay_out(collate([whole], "long", True), by_level, [0], 0, every, next(draft.parameters()).device)
    read = objective.read(layout)
    answer = layout.asked >= len(text.prompt)
    with objective.gather([target.embedding, target.head.weight]):
        head = objective.head()
        own = score(read.hidden[0][layout.asked[answer]], head)
        drafted = objective.draft_hidden(layout, read)
        for lag in lags:
            yield own, score(drafted[lag - 1][answer], head)
