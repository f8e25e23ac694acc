"""The copied branch of a tree: found where the text said the same, and put where the tree lacks it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspec.config import DraftConfig
from longspec.decoding.choose import Sampling
from longspec.decoding.copied import LEAST, MOST, Text, graft
from longspec.decoding.loop import decode, start
from longspec.decoding.methods.glide import Glide
from longspec.decoding.methods.lookup import NgramIndex
from longspec.decoding.methods.vanilla import Vanilla
from longspec.decoding.row import Row
from longspec.decoding.tree import TokenTree
from longspec.models.draft import DraftHead, GlideDraft
from tests.decoding.scripted import tiny_target


def text_of(*rows: list[int]) -> tuple[Text, torch.Tensor]:
    text = Text.empty(len(rows), max(map(len, rows)) + 3, torch.device("cpu"))
    text.tokens.fill_(7)  # what lies behind a text must not be taken for it
    text.fill(list(rows))
    return text, torch.tensor([len(row) for row in rows])


def found_slowly(text: list[int]) -> tuple[int, int]:
    """Run by run, the longest first, from the end back."""
    for run in range(min(MOST, len(text) - 1), LEAST - 1, -1):
        for place in range(len(text) - 1, run - 1, -1):
            if text[place - run : place] == text[-run:]:
                return run, place
    return 0, 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=3))
def test_the_longest_and_newest_run_is_found(rows: list[list[int]]) -> None:
    text, ends = text_of(*rows)
    runs, places = text.find(ends)
    for row, run, place in zip(rows, runs.tolist(), places.tolist(), strict=True):
        assert (run, place if run else 0) == found_slowly(row)


def test_what_the_tree_has_is_used_and_the_rest_is_added() -> None:
    # Behind "1 2 3" came 4 5 6; the tree has 4, and below it 9. Another row repeats nothing.
    text, ends = text_of([1, 2, 3, 4, 5, 6, 0, 1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 0])
    tokens, parents = torch.tensor([[3, 8, 4, 9]] * 2), torch.tensor([[0, 0, 0, 2]] * 2)
    scores = torch.tensor([[0.0, -1.0, -3.0, -4.0]] * 2)
    tree, found = graft(TokenTree(tokens, parents), scores, text, ends, 3)
    assert tree.tokens[0].tolist()[4:] == [3, 5, 6], "the first place is not needed: it is like the root"
    assert tree.parents[0].tolist()[4:] == [0, 2, 5]
    assert found[0, 2] > -3
    assert found[0, 2] > found[0, 5] > found[0, 6] > -3
    assert found[0, 4] == -torch.inf
    assert found[0, [0, 1, 3]].tolist() == [0, -1, -4]
    assert (found[1, 4:] == -torch.inf).all()
    assert torch.equal(found[1, :4], scores[1])


def test_a_loop_is_copied_as_a_loop() -> None:
    text, ends = text_of([9, 1, 2, 1, 2, 1, 2])
    tree, _ = graft(TokenTree(torch.tensor([[2]]), torch.tensor([[0]])), torch.zeros(1, 1), text, ends, 5)
    assert tree.tokens.tolist() == [[2, 1, 2, 1, 2, 1]]
    assert tree.parents.tolist() == [[0, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("max_nodes", [None, 12])
def test_repetition_is_accepted_in_long_runs(max_nodes: int | None) -> None:
    """A random target repeats itself soon; a random draft does not know how, and copying does."""
    target = tiny_target(vocab_size=11)
    draft = GlideDraft(target.config, DraftConfig(window=16))
    draft.initialise(torch.Generator().manual_seed(1), std=0.3)
    rows: dict[int, Row] = {}
    for num_copied in (-1, 0, 10):
        row = Row([3, 1, 4, 1, 5], 0, 120)
        glide = Glide(
            draft,
            DraftHead(target, None),
            (2, 2),
            max_nodes,
            draws=False,
            name="tree",
            num_copied=max(num_copied, 0),
        )
        method = Vanilla() if num_copied < 0 else glide
        for _ in decode(start(target, target.new_cache(1, 160), [row], Sampling()), method):
            pass
        rows[num_copied] = row
    assert rows[0].tokens == rows[10].tokens == rows[-1].tokens
    assert max(rows[0].depths) <= 2
    assert max(rows[10].depths) == 10
    assert rows[10].tau > 1.5 * rows[0].tau


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6, 1]),
        ([9, 2, 3, 4, 5, 2, 3, 7, 8, 2, 3], [7, 8, 2, 3]),
        ([5, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 4], []),
    ],
    ids=["what followed", "the newest place", "a loop", "nothing"],
)
def test_lookup_proposes_what_followed(text: list[int], expected: list[int]) -> None:
    assert NgramIndex(range(3, 1, -1)).following(Row(text[:2], 0, 9, tokens=text[2:]), 4) == expected
