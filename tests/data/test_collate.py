"""Batches, by hand-checked examples."""

from __future__ import annotations

import numpy as np
import pytest

from longspec.data.collate import Batch, collate
from longspec.data.shards import Packed
from longspec.errors import UserError

PAD, PROMPT, REASONING, TEXT = range(4)


def packed(tokens: list[int], roles: list[int], starts: list[int]) -> Packed:
    return Packed(np.array(tokens), np.array(roles, np.uint8), np.array(starts, np.int32))


# Two documents and padding; one document over the whole sequence.
CHAT = packed(
    [5, 6, 7, 8, 9, 10, 0, 0],
    [PROMPT, PROMPT, REASONING, TEXT, PROMPT, TEXT, PAD, PAD],
    [0, 4, 6],
)
PLAIN = packed([1, 2, 3, 4, 5, 6, 7, 8], [TEXT] * 8, [0])


def learnt(batch: Batch) -> list[str]:
    return ["".join(".x"[one] for one in row) for row in batch.learn.tolist()]


def test_tokens_and_starts() -> None:
    batch = collate([CHAT, PLAIN], "base", mask_prompt=False)
    assert batch.tokens.tolist() == [CHAT.tokens.tolist(), PLAIN.tokens.tolist()]
    assert batch.starts.tolist() == [[0, 0, 0, 0, 4, 4, 6, 6], [0] * 8]
    assert [str(one.dtype) for one in (batch.tokens, batch.starts, batch.learn)] == [
        "torch.int64",
        "torch.int64",
        "torch.bool",
    ]


@pytest.mark.parametrize(
    ("kind", "mask_prompt", "chat"),
    [
        ("base", False, ".xxx.x.."),
        ("long", False, ".xxx.x.."),
        ("long", True, "..xx.x.."),
        ("cot", False, "..xx.x.."),
        ("cot", True, "..xx.x.."),
    ],
)
def test_what_is_learnt(kind: str, mask_prompt: bool, chat: str) -> None:
    assert learnt(collate([CHAT, PLAIN], kind, mask_prompt)) == [chat, ".xxxxxxx"]


def test_bad_requests_are_named() -> None:
    with pytest.raises(UserError, match="'bass' is unknown"):
        collate([PLAIN], "bass", False)
    with pytest.raises(UserError, match="use 'long'"):
        collate([PLAIN], "base", True)
    with pytest.raises(UserError, match=r"\[2, 8\]"):
        collate([PLAIN, packed([1, 2], [TEXT] * 2, [0])], "base", False)
