"""Lookup: found where the text said the same, and put where a tree lacks it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspec.decoding import lookup
from longspec.decoding.expected import MAX_RUN, MIN_RUN
from longspec.decoding.lookup import find, graft
from longspec.decoding.methods import Lookup, Tree
from longspec.decoding.tree import TokenTree
from tests.decoding.scripted import ask, tiny_draft, tiny_engine, tiny_target


def text_of(*rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.full((len(rows), max(map(len, rows)) + 3), 7)  # what lies behind must not be taken for it
    for row, tokens in enumerate(rows):
        text[row, : len(tokens)] = torch.tensor(tokens)
    return text, torch.tensor([len(row) for row in rows])


def found_slowly(text: list[int]) -> tuple[int, int]:
    """Run by run, the longest first, from the end back."""
    for run in range(min(MAX_RUN, len(text) - 1), MIN_RUN - 1, -1):
        for place in range(len(text) - 1, run - 1, -1):
            if text[place - run : place] == text[-run:]:
                return run, place
    return 0, 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=3))
def test_the_longest_and_newest_run_is_found(rows: list[list[int]]) -> None:
    text, ends = text_of(*rows)
    for in_code in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not in_code:
                patch.setattr(lookup, "has_code", lambda x: False)
            runs, places = find(text, ends)
        for row, run, place in zip(rows, runs.tolist(), places.tolist(), strict=True):
            assert (run, place if run else 0) == found_slowly(row)


def test_what_the_tree_has_is_used_and_the_rest_is_added() -> None:
    # Behind "1 2 3" came 4 5 6; the tree has 4, and below it 9. Another row repeats nothing.
    text, ends = text_of([1, 2, 3, 4, 5, 6, 0, 1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 0])
    tokens, parents = torch.tensor([[3, 8, 4, 9]] * 2), torch.tensor([[0, 0, 0, 2]] * 2)
    scores = torch.tensor([[0.0, -1.0, -3.0, -4.0]] * 2)
    tree, found = graft(TokenTree(tokens, parents), scores, text, ends, 3, find(text, ends))
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
    root = TokenTree(torch.tensor([[2]]), torch.tensor([[0]]))
    tree, _ = graft(root, torch.zeros(1, 1), text, ends, 5, find(text, ends))
    assert tree.tokens.tolist() == [[2, 1, 2, 1, 2, 1]]
    assert tree.parents.tolist() == [[0, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("max_nodes", [None, 12])
def test_repetition_is_accepted_in_long_runs(max_nodes: int | None) -> None:
    """A random target repeats itself soon; a random draft does not know how, and lookup does."""
    target = tiny_target(vocab_size=11)
    engine = tiny_engine(target, tiny_draft(target, window=16, use_feature=False, lag_gate=False))
    prompts = [[3, 1, 4, 1, 5]]
    (vanilla,) = ask(engine, prompts, new=120)
    without, branch = (
        ask(
            engine,
            prompts,
            Tree(tree_shape=(2, 2), max_nodes=max_nodes, num_lookup=n),
            new=120,
        )[0]
        for n in (0, 10)
    )
    (lookup,) = ask(engine, prompts, Lookup(gamma=10), new=120)
    assert vanilla.tokens == without.tokens == branch.tokens == lookup.tokens
    assert max(without.depths) <= 2
    assert max(branch.depths) >= 9
    assert max(lookup.depths) == 10
    assert branch.tau > 1.5 * without.tau


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6, 1]),
        ([9, 2, 3, 4, 5, 2, 3, 7, 8, 2, 3], [7, 8, 2, 3]),
        ([5, 1, 2, 1, 2], [1, 2, 1, 2]),
    ],
    ids=["what followed", "the newest place", "a loop"],
)
def test_lookup_proposes_what_followed(text: list[int], expected: list[int]) -> None:
    held, ends = text_of(text)
    root = TokenTree(held[:, len(text) - 1 : len(text)], torch.tensor([[0]]))
    tree, scores = graft(root, torch.zeros(1, 1), held, ends, 4, find(held, ends, 2, 3))
    assert tree.tokens[0, 1:].tolist() == expected
    assert scores[0].tolist() == sorted(scores[0].tolist(), reverse=True)
