"""Packing: every token of every document once and in order, whatever the policy and the shard size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspec.data.pack import POLICIES, Document, Shelf
from longspec.data.shards import Packed, Role

PAD_ID = 0
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def documents(lengths: list[int]) -> list[Document]:
    """Document d's token t is 1000 d + t + 1, so that a token says where it is from; its role follows."""
    found = []
    for index, length in enumerate(lengths):
        tokens = np.arange(1, length + 1, dtype=np.uint32) + 1000 * index
        found.append(Document(tokens, (1 + tokens % 3).astype(np.uint8)))
    return found


def shards(policy: str, given: list[Document], seq_length: int, num_sequences: int) -> list[list[Packed]]:
    """The packing as the command does it, a shelf at a time."""
    shelf, made, rest = Shelf(POLICIES[policy], seq_length, num_sequences, PAD_ID), [], False
    for document in given:
        done = 0
        while done < len(document):
            done += shelf.put(document[done:])
            rest = not shelf.is_full
            if shelf.is_full:
                made.append(shelf.take())
    return [*made, shelf.take()] if rest else made


def parts(one: Packed) -> list[list[int]]:
    """A sequence's documents; checks the boundaries and what is padding on the way."""
    bounds = [*one.starts.tolist(), len(one.tokens)]
    assert bounds[0] == 0
    assert bounds == sorted(set(bounds))
    found = [one.tokens[a:b].tolist() for a, b in pairwise(bounds)]
    is_padding = one.roles == Role.PAD
    if is_padding.any():
        first = int(np.argmax(is_padding))
        assert is_padding[first:].all()
        assert first == one.starts[-1], "padding is a document of its own"
        assert set(found.pop()) == {PAD_ID}
    used = one.tokens[~is_padding]
    assert (one.roles[~is_padding] == 1 + used % 3).all(), "every token keeps its role"
    for tokens in found:
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens))), "one document, in order"
    return found


@pytest.mark.parametrize("policy", POLICIES)
@given(lengths=LENGTHS, seq_length=st.integers(2, 16), num_sequences=st.integers(1, 5))
def test_every_token_once_and_in_order(
    policy: str, lengths: list[int], seq_length: int, num_sequences: int
) -> None:
    given = documents(lengths)
    made = shards(policy, given, seq_length, num_sequences)
    sequences = [one for shard in made for one in shard]
    assert all(len(one.tokens) == len(one.roles) == seq_length for one in sequences)
    found = [part for one in sequences for part in parts(one)]
    expected = [token for document in given for token in document.tokens.tolist()]
    flat = [token for part in found for token in part]
    assert sorted(flat) == expected
    if policy != "whole":
        assert flat == expected
        assert all(len(shard) == num_sequences for shard in made[:-1])
        assert len(made[-1]) <= num_sequences
    if policy == "stream":
        assert sum((one.roles == Role.PAD).any() for one in sequences) <= 1
    if policy == "whole":
        # A document that fits is never cut; one that does not is cut as seldom as can be.
        assert len(found) == sum(-(-length // seq_length) for length in lengths)
    if policy == "single":
        assert len(sequences) == len(found) == sum(-(-length // seq_length) for length in lengths)


def test_whole_fits_documents_tightly() -> None:
    (one,) = shards("whole", documents([6, 5, 3, 2, 4, 9, 1]), 10, 100)
    assert len(one) == 3, "30 tokens fill three sequences"
    first_tokens = [[part[0] // 1000 for part in parts(sequence)] for sequence in one]
    assert first_tokens == [[0, 4], [1, 2, 3], [5, 6]], "in the order of the input"
