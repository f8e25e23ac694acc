"""Many sequences at once: each says what it would have said alone, and nothing is lost or computed twice."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longspec import LongSpec, UserError
from longspec.attention import choose_backend
from longspec.decoding.methods import VANILLA, Auto, Lookup, MagicDec, Seq, Tree
from longspec.decoding.sampling import AcceptanceRule, Sampling
from longspec.engine import chunks
from longspec.engine.costs import measure
from longspec.engine.engine import Engine
from longspec.engine.sequence import Sequence
from longspec.errors import BrokenTarget
from tests.decoding.scripted import ask, tiny_draft, tiny_engine, tiny_target
from tests.kernels.paged import DEVICE

V, PAGE = 61, 8
METHODS = {
    "vanilla": VANILLA,
    "seq": Seq(gamma=3),
    "tree": Tree(tree_shape=(2, 4, 4)),
    "pruned": Tree(tree_shape=(2, 4, 4), max_nodes=6, num_lookup=3),
    "magicdec": MagicDec(gamma=3, window=8, sinks=2),
    "lookup": Lookup(gamma=3),
    "doubting": Seq(gamma=3, min_confidence=0.3),
    "auto": Auto(),
    "drawn": Tree(tree_shape=(2, 4)),
}


def rule_of(name: str) -> AcceptanceRule:
    return "rejection" if name == "drawn" else "coupled"


# Their rounds depend on nobody else either.
ALIKE = ("vanilla", "seq", "tree", "pruned", "magicdec")
SAMPLINGS = {
    "greedy": Sampling(),
    "0.8": Sampling(0.8),
    "filtered": Sampling(0.9, top_k=20, top_p=0.9),
    "penalty": Sampling(1.1, repetition_penalty=1.3),
    "greedy penalty": Sampling(repetition_penalty=1.4),
}


@cache
def models() -> tuple[Any, Any]:
    target = tiny_target(3, vocab_size=V)
    return target, tiny_draft(target)


def small_engine(**sizes: Any) -> Engine:
    chosen: dict[str, Any] = {"max_length": 96, "max_rows": 3, "num_pages": 22, "page_size": PAGE} | sizes
    return tiny_engine(*models(), **chosen)


@pytest.fixture
def engine() -> Engine:
    """With room for everything."""
    made = small_engine(num_pages=80, max_rows=4)
    return made


@dataclass(frozen=True)
class Wish:
    """A sequence to be, and when it comes and goes."""

    document: int
    """So many tokens at the beginning are those of everybody's document."""
    own: int
    new: int
    method: str
    sampling: str
    seed: int
    eos_ids: frozenset[int] = frozenset()
    after: int = 0
    """It is submitted after so many pieces of news."""
    cancelled_at: int | None = None
    """It is cancelled once it has said so many tokens."""

    def sequence(self) -> Sequence:
        prompt = [(5 * place) % V for place in range(self.document)]
        prompt += [(7 * self.seed + 11 * place * place) % V for place in range(self.own)]
        return Sequence(
            prompt,
            self.new,
            SAMPLINGS[self.sampling],
            self.seed,
            self.eos_ids,
            METHODS[self.method],
            acceptance=rule_of(self.method),
        )

    @property
    def alone(self) -> Sequence:
        return answered_alone(replace(self, after=0, cancelled_at=None))


@cache
def answered_alone(wish: Wish) -> Sequence:
    """By an engine of its own."""
    engine, sequence = small_engine(), wish.sequence()
    engine.run([sequence])
    return sequence


def check(wish: Wish, sequence: Sequence) -> None:
    """It has said what it says alone, as far as it was let."""
    assert sequence.error is None
    if wish.method == "drawn" and wish.sampling not in ("greedy", "greedy penalty"):
        # Drawn again after a pause; of these only the distribution is sure.
        assert sequence.finished
        assert len(sequence.tokens) <= wish.new
        return
    alone = wish.alone
    if sequence.finish_reason == "closed":
        assert wish.cancelled_at is not None
        assert sequence.tokens == alone.tokens[: len(sequence.tokens)]
        return
    assert sequence.tokens == alone.tokens
    assert sequence.finish_reason == alone.finish_reason
    if sequence.num_first == 1 and wish.method in ALIKE:
        assert sequence.depths == alone.depths, "what is proposed depends on nobody else either"


def check_rests(engine: Engine) -> None:
    """Nothing is held or promised any more, once the engine has come to rest."""
    with engine.paused():
        pass
    assert engine.statistics.held_pages == 0
    assert not engine.scheduler.seats
    assert not engine.scheduler.waiting
    assert not engine.scheduler.pool._promised
    assert not bool(engine.device.slots.running.any())


wishes = st.builds(
    Wish,
    document=st.sampled_from([0, 8, 21, 40]),
    own=st.integers(1, 20),
    new=st.integers(1, 36),
    method=st.sampled_from(list(METHODS)),
    sampling=st.sampled_from(list(SAMPLINGS)),
    seed=st.integers(0, 50),
    eos_ids=st.sampled_from([frozenset(), frozenset({3}), frozenset(range(5)), frozenset(range(0, V, 3))]),
    after=st.integers(0, 6),
    cancelled_at=st.one_of(st.none(), st.none(), st.integers(1, 10)),
)


def submit_by_and_by(engine: Engine, planned: list[Wish]) -> list[Sequence]:
    """Submit each when it is time, and wait for all."""
    news: SimpleQueue[Sequence] = SimpleQueue()
    sequences = [wish.sequence() for wish in planned]
    for wish, sequence in zip(planned, sequences, strict=True):
        sequence.on_news = news.put
        if wish.cancelled_at is not None:
            sequence.stop_after = canceller(engine, sequence, wish.cancelled_at)
    started: list[Sequence] = []
    with engine.serving():
        for wish, sequence in zip(planned, sequences, strict=True):
            for _ in range(wish.after):
                if all(one.finished for one in started):
                    break
                news.get(timeout=20)
            engine.submit([sequence])
            started.append(sequence)
        while not all(one.finished for one in sequences):
            news.get(timeout=20)
    return sequences


def canceller(engine: Engine, sequence: Sequence, at: int) -> Any:
    def stop_after(token: int) -> bool:
        if len(sequence.tokens) == at:
            engine.cancel(sequence)
        return False

    return stop_after


def submitter(engine: Engine, sequence: Sequence, at: int, other: Sequence) -> Callable[[int], bool]:
    """Submits the other once the sequence has said so many tokens."""

    def stop_after(token: int) -> bool:
        if len(sequence.tokens) == at:
            engine.submit([other])
        return False

    return stop_after


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(wishes, min_size=2, max_size=7))
def test_each_says_what_it_says_alone(planned: list[Wish]) -> None:
    """With few slots and few pages, so that some wait and some are paused and computed again."""
    engine = small_engine()
    sequences = submit_by_and_by(engine, planned)
    for wish, sequence in zip(planned, sequences, strict=True):
        check(wish, sequence)
    check_rests(engine)


def test_all_methods_and_acceptances_at_once() -> None:
    """Each with its own sampling, end tokens and penalty; trees see to their own path's repetitions."""
    planned = [
        Wish(0, 5 + index, 30, method, sampling, 7 * index, frozenset({index + 3, index + 30}))
        for index, (method, sampling) in enumerate(
            [*zip(METHODS, [*SAMPLINGS] * 2, strict=False), ("tree", "penalty"), ("tree", "greedy penalty")]
        )
    ]
    engine = small_engine(max_rows=12, num_pages=200)
    sequences = submit_by_and_by(engine, planned)
    for wish, sequence in zip(planned, sequences, strict=True):
        check(wish, sequence)
        assert sequence.methods.total() == sequence.num_rounds
    assert {"eos", "length"} == {one.finish_reason for one in sequences}
    assert set(engine.statistics.rounds) >= {"vanilla", "seq", "tree", "magicdec", "lookup"}
    check_rests(engine)


def test_a_repetition_penalty_forbids_in_trees_too(engine: Engine) -> None:
    (said,) = ask(engine, [[1, 2, 3]], METHODS["tree"], Sampling(repetition_penalty=1e6), new=40)
    assert len({*said.tokens, 1, 2, 3}) == 43


def test_pages_run_out_and_nothing_is_lost() -> None:
    planned = [
        Wish(0, 12 + index, 60, method, "0.8", index)
        for index, method in enumerate(["vanilla", "seq", "tree", "magicdec", "lookup", "vanilla"])
    ]
    engine = small_engine(max_rows=4, num_pages=16)
    sequences = submit_by_and_by(engine, planned)
    for wish, sequence in zip(planned, sequences, strict=True):
        check(wish, sequence)
        assert len(sequence.tokens) == 60
    paused = engine.statistics.num_paused
    assert 0 < paused < 20, "who is paused waits until there is room"
    assert sum(one.num_first - 1 for one in sequences) <= paused
    told = engine.statistics
    assert told.prompt_tokens == sum(wish.own for wish in planned), "each prompt counts once"
    assert told.shared_tokens == sum(one.num_shared for one in sequences) == 0
    check_rests(engine)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_who_runs_out_of_pages_does_not_wait_for_a_long_prompt(
    runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where launches are in flight at all times, as on a GPU."""
    monkeypatch.setattr(chunks, "PLAIN_BESIDE", 4)
    engine = small_engine(max_rows=2, num_pages=14)
    engine.loop.runs_ahead = runs_ahead
    young = Sequence([place % V for place in range(90)], 4, method=VANILLA)
    old, turns, news = Sequence([1] * 10, 60, method=VANILLA), [0], list[int]()
    old.stop_after = submitter(engine, old, 3, young)
    old.on_news = lambda _: news.append(turns[0])
    turn = engine.loop.turn

    def counted() -> None:
        turns[0] += 1
        turn()

    monkeypatch.setattr(engine.loop, "turn", counted)
    engine.run([old])
    engine.lead(lambda: young.finished)
    assert engine.statistics.num_paused == 1
    assert max(later - earlier for earlier, later in itertools.pairwise(news)) <= 3
    assert (len(old.tokens), len(young.tokens)) == (60, 4)
    check_rests(engine)


def test_one_that_never_fits_fails_alone() -> None:
    """There is room for its text but not for the tree behind it; who waits has room."""
    engine = small_engine(max_rows=2, num_pages=6)
    large = Sequence([1] * 40, 8, method=METHODS["tree"])
    small = Sequence([2] * 10, 8, method=METHODS["tree"])
    with pytest.raises(UserError, match="KV memory of 48 tokens is too small"):
        engine.run([large, small])
    engine.lead(lambda: small.finished)
    again = Sequence([2] * 10, 8, method=METHODS["tree"])
    engine.run([again])
    assert small.tokens == again.tokens
    check_rests(engine)


def test_what_is_refused_leaves_nothing_behind(engine: Engine) -> None:
    fine, long = Sequence([1], 4, method=VANILLA), Sequence([1] * 90, 40, method=VANILLA)
    with pytest.raises(UserError, match="130 tokens exceeds the engine's 96"):
        engine.run([fine, long])
    assert fine.submitted_at == 0
    with pytest.raises(UserError, match="needs a draft"):
        tiny_engine(models()[0]).run([Sequence([1], 4, method=METHODS["tree"])])


def test_cancelling_frees_slot_and_pages_at_once(engine: Engine) -> None:
    other = Sequence([9, 8, 7], 80, seed=1, method=METHODS["vanilla"])
    one = Sequence([1, 2, 3], 80, seed=1, method=METHODS["tree"])
    held: list[int] = []

    def note(token: int) -> bool:
        held.append(len(engine.scheduler.seats))
        return False

    other.stop_after = note
    engine.submit([one])
    engine.lead(lambda: bool(one.tokens))
    worker = threading.Thread(target=engine.run, args=([other],))
    worker.start()
    engine.cancel(one)
    assert all(seat.sequence is not one for seat in engine.scheduler.seats.values())
    said = len(one.tokens)
    assert one.finish_reason == "closed"
    worker.join()
    assert held[-1] == 1
    assert len(one.tokens) == said < 80
    check_rests(engine)


def pages_of(engine: Engine, text: list[int]) -> list[int]:
    """The pages that hold a text's beginning."""
    pool = engine.scheduler.pool
    found = pool.share(pool.hashes(text))
    pool.release(found)
    return found


def contents(engine: Engine, pages: list[int]) -> list[torch.Tensor]:
    kv, size = engine.models.pages, engine.scheduler.pool.size
    return [x[:, :, page * size : (page + 1) * size].clone() for x in (kv.keys, kv.values) for page in pages]


def test_questions_about_one_document_prefill_it_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = [(3 * place) % V for place in range(5 * PAGE)]
    prompts = [[*document, question, question] for question in (1, 2, 3, 4)]
    pool = engine.scheduler.pool
    with monkeypatch.context() as patch:
        patch.setattr(chunks, "PLAIN_BESIDE", 8)
        hashes = Mock(side_effect=pool.hashes)
        patch.setattr(pool, "hashes", hashes)
        asked = ask(engine, prompts, METHODS["tree"], new=20)
    assert hashes.call_count == 2 * 4, "at the beginning and at the end, not while they wait"
    assert [one.num_shared for one in asked] == [0, 40, 40, 40], "also where they come together"
    assert engine.statistics.prompt_tokens == 4 * 42
    assert engine.statistics.shared_tokens == 3 * 40
    pages = pages_of(engine, document)
    assert len(pages) == 5
    before = contents(engine, pages)
    for name, method in METHODS.items():
        again = ask(engine, prompts, method, new=20, acceptance=rule_of(name))
        if rule_of(name) == "coupled":
            assert [one.tokens for one in again] == [one.tokens for one in asked]
        # Of a prompt that is there as a whole its last token is computed again, for its logits.
        assert all(one.num_shared == 40 for one in again)
    (whole,) = ask(engine, [document])
    assert whole.num_shared == 32
    assert pages_of(engine, document) == pages
    assert all(map(torch.equal, before, contents(engine, pages))), "a shared page is never written"
    engine.forget()
    (fresh,) = ask(engine, prompts[:1], METHODS["tree"], new=20)
    assert (fresh.num_shared, fresh.tokens) == (0, asked[0].tokens)


def test_an_answer_is_remembered_with_its_prompt(engine: Engine) -> None:
    (first,) = ask(engine, [[1, 2, 3, 4, 5]], METHODS["tree"], new=30)
    (second,) = ask(engine, [[*first.text, 6, 7]], METHODS["tree"], new=20)
    assert second.num_shared == (len(first.text) - 1) // PAGE * PAGE
    engine.forget()
    (fresh,) = ask(engine, [[*first.text, 6, 7]], new=20)
    assert fresh.tokens == second.tokens


def test_an_error_reaches_every_caller_and_the_engine_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(engine, [[1, 2, 3], [4, 5]], METHODS["seq"])
    run_round, rounds = engine.device.round, []

    def fails_once(*args: Any) -> Any:
        rounds.append(1)
        if len(rounds) == 5:
            raise ValueError("the device is tired")
        return run_round(*args)

    monkeypatch.setattr(engine.device, "round", fails_once)
    held, release = threading.Event(), threading.Event()

    def wait_once(token: int) -> bool:
        held.set()
        release.wait(20)
        return False

    first = Sequence([1], 60, method=VANILLA, stop_after=wait_once)
    callers = [first, Sequence([2], 60, method=VANILLA), Sequence([3], 60, method=METHODS["tree"])]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(engine.run, callers[:1])]
        assert held.wait(20)
        # The engine stands still, so that the others are there before it goes on.
        waiting += [pool.submit(engine.run, [one]) for one in callers[1:]]
        deadline = time.monotonic() + 20
        while engine._orders.qsize() < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        release.set()
        for one in waiting:
            with pytest.raises(ValueError, match="the device is tired"):
                one.result(20)
    assert {one.finish_reason for one in callers} == {"closed"}
    check_rests(engine)
    again = ask(engine, [[1, 2, 3], [4, 5]], METHODS["seq"])
    assert [one.tokens for one in again] == [one.tokens for one in expected]


def test_what_is_measured_does_not_spoil_later_answers(engine: Engine) -> None:
    prompt = [place % V for place in range(70)]
    before = ask(engine, [prompt], METHODS["tree"], new=20)[0]
    ask(engine, [[7] * 80], new=8)
    pages = pages_of(engine, prompt)
    kept = contents(engine, pages)
    with engine.paused() as device:
        measure(device, engine.candidates[:1])
    found = pages_of(engine, prompt)
    assert all(map(torch.equal, contents(engine, found), kept if found else []))
    assert ask(engine, [prompt], METHODS["tree"], new=20)[0].tokens == before.tokens


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_numbers_that_overflow_in_an_answer_end_it(backend: str) -> None:
    target = tiny_target(3, vocab_size=V).to(DEVICE if backend == "triton" else "cpu")
    target.attention = choose_backend(backend)
    sizes = {"max_length": 48, "max_rows": 2, "num_pages": 12}
    prompt, new = [1, 2, 3], 6 if backend == "triton" else 20
    said = ask(tiny_engine(target, tiny_draft(target), **sizes), [prompt], VANILLA, new=new)[0].tokens
    place = next(i for i in range(2, new - 1) if said[i] not in [*prompt, *said[:i]])
    target.embedding[said[place]] = torch.inf
    engine = tiny_engine(target, tiny_draft(target), **sizes)
    assert engine.models.fused == (backend == "triton")
    cases: list[tuple[Any, int, int | None]] = [(METHODS["seq"], 1, None), (VANILLA, 1, 2)]
    if backend == "torch":
        cases += [(VANILLA, 1, None), (VANILLA, 4, None), (METHODS["tree"], 1, None)]
    for method, ahead, num_logprobs in cases:
        one = Sequence(prompt, new, method=method, num_logprobs=num_logprobs)
        with pytest.raises(BrokenTarget, match="scores are not finite"):
            list(engine.run_each([one], ahead))
        assert one.tokens == said[: len(one.tokens)]
        assert len(one.tokens) <= place + 1
    fine = Sequence(prompt, place, method=METHODS["seq"])
    engine.run([fine])
    assert fine.tokens == said[:place], "the engine goes on"


class Panic(BaseException):
    """As pyo3 raises where Rust code panics."""


@pytest.mark.parametrize("error", [ValueError("broken"), Panic("broken")])
def test_a_stop_rule_that_fails_ends_its_own_sequence(engine: Engine, error: BaseException) -> None:
    (expected,) = ask(engine, [[1, 2, 3]], new=20)

    def fail(token: int) -> bool:
        raise error

    bad, good = Sequence([1, 2, 3], 20, stop_after=fail), Sequence([1, 2, 3], 20, method=METHODS["tree"])
    for one in (bad, good):
        engine.submit([one])
    engine.lead(lambda: bad.finished and good.finished)
    assert (bad.finish_reason, bad.error) == ("closed", error)
    assert (good.error, good.tokens) == (None, expected.tokens)
    assert not engine.loop.is_busy
    assert engine.statistics.held_pages == 0


def test_a_short_text_does_not_drop_a_long_one_that_begins_alike(engine: Engine) -> None:
    template = [9] * PAGE
    document = [*template, *((3 * place) % V for place in range(6 * PAGE))]
    for method in (VANILLA, METHODS["tree"]):
        engine.forget()
        ask(engine, [[*document, 1]], method)
        (short,) = ask(engine, [[*template, 5, 6]], method, new=2 * PAGE)
        (again,) = ask(engine, [[*document, 2]], method)
        assert (short.num_shared, again.num_shared) == (PAGE, 7 * PAGE)


def test_a_long_prompt_holds_nobody_up_for_more_than_a_chunk(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "PLAIN_BESIDE", 16)
    events: list[str] = []
    take, run_round = engine.device.take, engine.device.round

    def noted(event: str, call: Callable[..., Any], *args: Any) -> Any:
        events.append(event)
        return call(*args)

    monkeypatch.setattr(engine.device, "take", partial(noted, "chunk", take))
    monkeypatch.setattr(engine.device, "round", partial(noted, "round", run_round))
    long = Sequence([place % V for place in range(90)], 4, method=VANILLA)
    short = Sequence([1, 2, 3], 60, method=METHODS["seq"])
    short.stop_after = submitter(engine, short, 3, long)
    engine.run([short])
    engine.lead(lambda: long.finished)
    begin = events.index("chunk", 1)
    end = len(events) - events[::-1].index("chunk")
    assert events[begin:end] == ["chunk", "round"] * 5 + ["chunk"]


@pytest.mark.parametrize("method", ["vanilla", "seq", "tree", "magicdec"])
def test_the_device_is_left_to_others_between_sequences(engine: Engine, method: str) -> None:
    (before,) = ask(engine, [[1, 2, 3]], METHODS[method])
    with engine.paused() as device:
        assert not bool(device.slots.running.any())
        waiting = threading.Thread(target=ask, args=(engine, [[1, 2, 3]], METHODS[method]))
        waiting.start()
        time.sleep(0.05)
        assert waiting.is_alive()
    waiting.join(20)
    assert not waiting.is_alive()
    assert ask(engine, [[1, 2, 3]], METHODS[method])[0].tokens == before.tokens


def test_larger_trees_than_there_was_room_for(engine: Engine) -> None:
    """The draft's ring is made anew, also below sequences that run."""
    running = Sequence([1, 2, 3], 60, Sampling(0.8), method=METHODS["tree"])
    wide = Sequence([4, 5], 20, Sampling(0.8), method=Tree(tree_shape=(20, 60, 60)))
    running.stop_after = submitter(engine, running, 9, wide)
    engine.run([running])
    engine.lead(lambda: wide.finished)
    for one in (running, wide):
        alone = Sequence(one.prompt, one.max_new_tokens, one.sampling, one.seed, method=VANILLA)
        engine.run([alone])
        assert alone.tokens == one.tokens


def test_the_first_token_does_not_wait_for_a_round(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    told, launch = list[int](), engine.loop.device.round
    sequence = Sequence([1, 2, 3], 6, Sampling(), 1, frozenset(), METHODS["tree"])

    def launch_and_note(*given: Any) -> Any:
        told.append(len(sequence.tokens))
        return launch(*given)

    monkeypatch.setattr(engine.loop.device, "round", launch_and_note)
    engine.run([sequence])
    assert told[0] == 1
    told.clear()
    ends = Sequence([1, 2, 3], 6, Sampling(), 1, frozenset(sequence.tokens[:1]), METHODS["tree"])
    engine.run([ends])
    assert (ends.finish_reason, told) == ("eos", [])


def test_threads_share_a_model(tiny: LongSpec) -> None:
    prompts = ["Name three colours.", "Hi", "Count to ten.", "Where is the sea?", "Why?", "A list of fruit:"]
    options: list[dict[str, Any]] = [
        {"method": "lookup"}, {"temperature": 0.8}, {"method": "vanilla"},
        {"method": "magicdec"}, {"temperature": 1.2, "top_p": 0.8}, {"repetition_penalty": 1.3},
    ]  # fmt: skip
    works = [
        (prompt, {"max_new_tokens": 12, "seed": 3} | one)
        for prompt, one in zip(prompts, options, strict=True)
    ]
    expected = [tiny.generate(prompt, **one).text for prompt, one in works]
    tiny.reset()

    def generate(work: tuple[str, dict[str, Any]]) -> str:
        return tiny.generate(work[0], **work[1]).text

    def stream(work: tuple[str, dict[str, Any]]) -> str:
        return "".join(tiny.stream(work[0], **work[1]))

    with ThreadPoolExecutor(12) as pool:
        found = [pool.submit(call, work) for work in works for call in (generate, stream)]
        assert [one.result(60) for one in found] == [text for text in expected for _ in "ab"]


def test_vanilla_rounds_that_run_ahead_of_the_host_say_the_same(engine: Engine) -> None:
    """Rows end within what was launched: at eos, at their limit, at a stop rule; more come than there are
    slots, and trees beside them run round by round."""
    ends = [frozenset[int](), frozenset({3, 11}), frozenset(range(0, V, 3))]

    def wanted() -> list[Sequence]:
        made = [
            Sequence([1 + number % 7] * (1 + 5 * number % 31), 1 + 3 * number, SAMPLINGS[sampling], number,
                     ends[number % 3], METHODS["tree"] if number == 4 else VANILLA)
            for number, sampling in enumerate([*SAMPLINGS] * 3)
        ]  # fmt: skip
        made[7].stop_after = lambda token: len(made[7].tokens) == 5
        return made

    expected, found = wanted(), wanted()
    engine.run(expected)
    assert set(engine.run_each(iter(found), ahead=8)) == set(found)
    for one, other in zip(expected, found, strict=True):
        assert (one.tokens, one.finish_reason, one.num_rounds, one.depths) == (
            other.tokens, other.finish_reason, other.num_rounds, other.depths
        )  # fmt: skip
    check_rests(engine)
