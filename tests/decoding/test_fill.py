"""Prompts that are taken in a few tokens at a time are in the cache as if they had been read at once."""

from __future__ import annotations

import pytest
import torch

from longspec.decoding.choose import Sampling
from longspec.decoding.device import RoundStore
from longspec.decoding.fill import SIZE, pays
from longspec.decoding.loop import DecodeState, decode, prefill, start
from longspec.decoding.methods.vanilla import Vanilla
from longspec.decoding.row import Row
from longspec.models.target import Transformer
from tests.decoding.scripted import tiny_target

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@pytest.fixture(params=DEVICES)
def target(request: pytest.FixtureRequest) -> Transformer:
    """A random one, on each device that is there."""
    return tiny_target(vocab_size=40, max_length=1024, head_dim=32).to(request.param)


def begun(target: Transformer, lengths: tuple[int, ...], capacity: int = 512) -> DecodeState:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(40, (n,), generator=generator).tolist() for n in lengths]
    rows = [Row(prompt, 5 + index, 20) for index, prompt in enumerate(prompts)]
    return start(target, target.new_cache(len(rows), capacity), rows, Sampling(0.9))


@pytest.mark.parametrize("lengths", [(5,), (SIZE,), (SIZE + 1, 3, 3 * SIZE)])
def test_the_cache_is_as_if_prompts_had_been_read_at_once(
    target: Transformer, lengths: tuple[int, ...]
) -> None:
    whole, pieces = begun(target, lengths), begun(target, lengths)
    store = RoundStore()
    with torch.inference_mode():
        prefill(whole, 2048)
        filled = store.fill(pieces)
        assert filled
        prefill(pieces, 2048, lambda state: filled)
    assert pieces.cache.lengths.tolist() == whole.cache.lengths.tolist() == list(lengths)
    assert pieces.num_prefilled == whole.num_prefilled == sum(lengths)
    assert pieces.roots.tolist() == whole.roots.tolist()
    torch.testing.assert_close(pieces.feature, whole.feature, rtol=1e-4, atol=1e-5)
    for row, length in enumerate(lengths):
        for one, other in ((pieces.cache.keys, whole.cache.keys), (pieces.cache.values, whole.cache.values)):
            torch.testing.assert_close(
                one[:, row, :, :length], other[:, row, :, :length], rtol=1e-4, atol=1e-5
            )


def test_a_cache_is_filled_again_and_again_and_keeps_what_it_has(target: Transformer) -> None:
    store, answers = RoundStore(), []
    with torch.inference_mode():
        assert store.fill(begun(target, (30,)))  # another cache, which is let go then
    state = begun(target, (100, 7))
    for kept in (0, 3, 90):
        for filled in (False, True):
            state.cache.truncate(torch.tensor([kept, min(kept, 6)]))
            rows = [Row(row.prompt, row.seed, row.max_new_tokens) for row in state.rows]
            again = start(target, state.cache, rows, state.sampling)
            for _ in decode(again, Vanilla(), fill=store.fill if filled else None):
                pass
            assert again.num_prefilled == sum((100 - kept, 7 - min(kept, 6)))
            answers.append([row.tokens for row in rows])
    assert all(one == answers[0] for one in answers)


def test_it_is_left_to_the_loop_where_it_does_not_pay(target: Transformer) -> None:
    assert pays(begun(target, (100,)))
    assert not pays(begun(target, (100,), capacity=100 + SIZE - 1))  # no room for the padding
    assert pays(begun(target, (100,), capacity=100 + SIZE))
    assert not pays(begun(target, (4000,), capacity=8000))
    full = begun(target, (100,), capacity=120)
    for _ in decode(full, Vanilla(), fill=RoundStore().fill):
        pass
    assert len(full.rows[0].tokens) == 20
