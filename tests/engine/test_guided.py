"""Sequences that tell probabilities or follow a constraint, beside others that do neither."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longspec.attention import choose_backend
from longspec.decoding.methods import VANILLA, Lookup, MethodChoice, Seq, Tree
from longspec.decoding.sampling import Sampling
from longspec.engine.engine import Engine
from longspec.engine.sequence import Sequence
from tests.decoding.scripted import tiny_draft, tiny_engine, tiny_target

V = 61
TREE = Tree((2, 4, 4))


@pytest.fixture
def engine() -> Engine:
    target = tiny_target(3, vocab_size=V)
    return tiny_engine(target, tiny_draft(target), max_rows=4, page_size=8)


def asked(prompt: list[int], method: MethodChoice = TREE, **more: object) -> Sequence:
    sampling = more.pop("sampling", Sampling())
    assert isinstance(sampling, Sampling)
    made = Sequence(prompt, 20, sampling, 5, frozenset({2}), method)
    for name, value in more.items():
        setattr(made, name, value)
    return made


class Evens:
    """Only even tokens may be said, each once; at the end only eos, which is 2."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def fill(self, mask: Tensor, tokens: list[int]) -> None:
        if len(tokens) == self.fails_at:
            raise ValueError("no further")
        wanted = [token for token in range(4, V, 2) if token not in tokens] if len(tokens) < 9 else [2]
        for token in wanted:
            mask[token // 32] |= 1 << token % 32 if token % 32 < 31 else -(2**31)


SAMPLINGS = [Sampling(), Sampling(0.8), Sampling(0.9, top_p=0.9, repetition_penalty=1.3)]
# One token, less than a page, whole pages, and more.
PROMPTS = [[7], list(range(3, 10)), list(range(10, 26)), list(range(5, 40))]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_telling_probabilities_changes_no_word(engine: Engine, sampling: Sampling) -> None:
    plain = [asked(prompt, VANILLA, sampling=sampling) for prompt in PROMPTS]
    engine.run(plain)
    engine.forget()
    told = [asked(prompt, sampling=sampling, num_logprobs=k) for k, prompt in enumerate(PROMPTS)]
    beside = [asked(prompt, sampling=sampling) for prompt in PROMPTS]
    engine.run([one for pair in zip(told, beside, strict=True) for one in pair])
    for alone, one, other in zip(plain, told, beside, strict=True):
        assert one.tokens == alone.tokens == other.tokens
        assert one.finish_reason == alone.finish_reason
        assert len(one.logprobs) == len(one.tokens) == len(one.depths) == len(one.copied)
        assert not other.logprobs


def test_probabilities_are_the_targets(engine: Engine) -> None:
    one = asked(PROMPTS[1], num_logprobs=5)
    engine.run([one])
    # What the target gives to the whole text when it is read anew, one token further each time.
    for place, (chosen, top) in enumerate(one.logprobs):
        again = asked([*one.prompt, *one.tokens[:place]], num_logprobs=V)
        again.max_new_tokens = 1
        engine.forget()
        engine.run([again])
        scores = dict(again.logprobs[0][1])
        assert len(scores) == V
        assert torch.tensor(list(scores.values())).exp().sum().item() == pytest.approx(1, abs=1e-5)
        assert chosen == pytest.approx(scores[one.tokens[place]], abs=1e-4)
        assert top[0] == (one.tokens[place], chosen)  # it is greedy
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert [value for _, value in top] == pytest.approx([scores[token] for token, _ in top], abs=1e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_constraint_holds_from_the_first_token_to_eos(engine: Engine, sampling: Sampling) -> None:
    alone = asked(PROMPTS[2], sampling=sampling, constraint=Evens())
    engine.run([alone])
    assert alone.tokens[-1] == 2
    assert len(alone.tokens) == 10
    assert alone.finish_reason == "eos"
    assert all(token % 2 == 0 and token > 2 for token in alone.tokens[:-1])
    # Beside others, one of which fails in the middle.
    failing = asked(PROMPTS[1], constraint=Evens(fails_at=3))
    again = replace(alone, constraint=Evens(), tokens=[], depths=[], copied=[], finish_reason=None)
    free = asked(PROMPTS[3], sampling=sampling)
    engine.submit([failing, again, free])
    engine.lead(lambda: all(one.finished for one in (failing, again, free)))
    assert again.tokens == alone.tokens
    assert str(failing.error) == "no further"
    assert len(failing.tokens) == 3
    assert free.error is None
    assert free.finish_reason in ("eos", "length")
    assert engine.statistics.held_pages == 0


def test_a_token_that_was_looked_up_is_told_apart(engine: Engine) -> None:
    repeated = asked([5, 6, 7, 8] * 6, Lookup(3), eos_ids=frozenset())
    drafted = asked(PROMPTS[1], Seq(3), eos_ids=frozenset())
    engine.run([repeated, drafted])
    for one in (repeated, drafted):
        is_copied = one is repeated
        assert one.copied == [is_copied and depth > 0 for depth in one.depths]


def test_cancel_without_waiting_ends_before_the_next_round(engine: Engine) -> None:
    one = asked(PROMPTS[1], eos_ids=frozenset())
    one.max_new_tokens = 120

    def leave(sequence: Sequence) -> None:
        if len(sequence.tokens) > 10:
            engine.cancel(sequence, waits=False)

    one.on_news = leave
    engine.run([one])
    assert one.finish_reason == "closed"
    assert 10 < len(one.tokens) <= 10 + 4 + 4


def test_our_kernels_are_guided_alike() -> None:
    sampling = SAMPLINGS[2]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for backend in ("torch", "triton"):
        target = tiny_target(3, vocab_size=V).to(device)
        target.attention = choose_backend(backend)
        engine = tiny_engine(target, tiny_draft(target), max_length=48, max_rows=2, num_pages=12)
        assert engine.models.fused == (backend == "triton")
        told = asked(PROMPTS[1], sampling=sampling, num_logprobs=3, max_new_tokens=3)
        held = asked(PROMPTS[2], sampling=sampling, constraint=Evens(), max_new_tokens=3)
        engine.run([told, held])
        found.append((told, held))
    (plain, plain_held), (fused, fused_held) = found
    assert fused.tokens == plain.tokens
    assert fused_held.tokens == plain_held.tokens
    assert all(token % 2 == 0 for token in fused_held.tokens)
    for ours, theirs in zip(fused.logprobs, plain.logprobs, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-3)
        assert [token for token, _ in ours[1]] == [token for token, _ in theirs[1]]


def test_where_pages_are_few_guided_sequences_wait_and_say_the_same() -> None:
    target = tiny_target(3, vocab_size=V)
    wide = tiny_engine(target, max_rows=4, page_size=8)
    narrow = tiny_engine(target, max_rows=4, page_size=8, num_pages=12, max_length=60)
    said = []
    for engine in (wide, narrow):
        asked_for = [
            asked(list(range(k, k + 20)), VANILLA, num_logprobs=1, eos_ids=frozenset()) for k in range(4)
        ]
        asked_for += [asked(list(range(9, 30)), VANILLA, constraint=Evens())]
        engine.run(asked_for)
        said.append([one.tokens for one in asked_for])
        assert all(len(one.logprobs) == len(one.tokens) for one in asked_for[:4])
    assert narrow.statistics.num_paused > 0
    assert said[0] == said[1]
