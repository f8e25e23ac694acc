"""Vanilla decoding of the real default target: rows, stops, limits, and what is not computed twice."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from longspec import Generation, LongSpec, UserError
from longspec.engine import chunks

PROMPTS = [
    "Name three colours.",
    "What is the capital of France?",
    "Write a haiku about the sea, and then explain each of its lines in a sentence of its own.",
]


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_a_row_does_not_depend_on_its_neighbours(smollm2: LongSpec, temperature: float) -> None:
    seeds = [5, 6, 7]
    options = {"max_new_tokens": 12, "temperature": temperature}
    together = smollm2.generate(PROMPTS, seed=seeds, **options)  # type: ignore[call-overload]
    for prompt, seed, row in zip(PROMPTS, seeds, together, strict=True):
        smollm2.reset()
        alone = smollm2.generate(prompt, seed=seed, **options)  # type: ignore[call-overload]
        assert row.token_ids == alone.token_ids
        assert row.text == alone.text
    lengths = {row.tokens for row in together}
    assert len(lengths) > 1, "rows that stop at different lengths are the point"


def test_seeds_repeat_and_are_reported(smollm2: LongSpec) -> None:
    first = smollm2.generate(PROMPTS[2], max_new_tokens=10, temperature=1.0)
    again = smollm2.generate(PROMPTS[2], max_new_tokens=10, temperature=1.0, seed=first.seed)
    assert again.token_ids == first.token_ids
    pair = smollm2.generate([PROMPTS[2]] * 2, max_new_tokens=10, temperature=1.0, seed=first.seed)
    assert [row.seed for row in pair] == [first.seed, first.seed + 1]
    assert pair[0].token_ids == first.token_ids != pair[1].token_ids


def test_stops_at_eos_length_and_stop_string(smollm2: LongSpec) -> None:
    whole = smollm2.generate(PROMPTS[1], max_new_tokens=64)
    assert whole.finish_reason == "eos"
    assert whole.token_ids[-1] in smollm2.eos_ids
    assert whole.text == "The capital of France is Paris."

    short = smollm2.generate(PROMPTS[1], max_new_tokens=3)
    assert (short.finish_reason, short.token_ids) == ("length", whole.token_ids[:3])

    # the stop string begins inside one token and ends inside another
    stopped = smollm2.generate(PROMPTS[1], max_new_tokens=64, stop=["never said", "tal of Fr"])
    assert (stopped.finish_reason, stopped.text) == ("stop", "The capi")
    assert stopped.token_ids == whole.token_ids[: stopped.tokens]
    pieces = list(smollm2.stream(PROMPTS[1], max_new_tokens=64, stop="tal of Fr"))
    assert "".join(pieces) == "The capi"


def test_figures_add_up(smollm2: LongSpec) -> None:
    result = smollm2.generate(PROMPTS[0], method="vanilla", max_new_tokens=12)
    assert isinstance(result, Generation)
    assert result.rounds == result.tokens - 1
    assert result.tau == 1.0
    assert result.accepted_by_depth == []
    assert 0 < result.prefill_seconds < result.seconds
    assert set(result.to_json()) == {
        *("text", "tokens", "prompt_tokens", "rounds", "tau", "accepted_by_depth", "seconds"),
        *("tokens_per_second", "method", "label", "tree_shape", "seed", "finish_reason"),
        *("target", "draft", "device", "dtype", "weights", "kv_dtype"),
    }


def test_repetition_penalty_reaches_back_into_the_prompt(smollm2: LongSpec) -> None:
    prompt = smollm2.tokenizer("red red red red red red")["input_ids"]
    plain = smollm2.generate(prompt, max_new_tokens=8)
    assert set(plain.token_ids) & set(prompt)
    penalised = smollm2.generate(prompt, max_new_tokens=8, repetition_penalty=8.0)
    assert not set(penalised.token_ids) & set(prompt)
    assert len(set(penalised.token_ids)) == 8, "nor may it repeat itself"


def test_a_conversation_computes_only_what_is_new(smollm2: LongSpec) -> None:
    messages = [{"role": "user", "content": "My name is Ada. Remember it."}]
    first = smollm2.generate(messages, max_new_tokens=20)
    assert first.prefilled_tokens == first.prompt_tokens
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "What is my name?"},
    ]
    second = smollm2.generate(messages, max_new_tokens=10)
    assert second.prefilled_tokens < 40 < second.prompt_tokens
    smollm2.reset()
    fresh = smollm2.generate(messages, max_new_tokens=10)
    assert fresh.prefilled_tokens == fresh.prompt_tokens
    assert fresh.token_ids == second.token_ids


def test_a_second_question_about_the_same_document_keeps_it(smollm2: LongSpec) -> None:
    document = "The blue door leads to the garden. " * 40
    first = smollm2.generate(document + "Where does the blue door lead?", max_new_tokens=4)
    second = smollm2.generate(document + "What colour is the door?", max_new_tokens=4)
    assert first.prefilled_tokens > 320
    assert second.prefilled_tokens < 46
    # the cache grows without forgetting
    third = smollm2.generate(document * 2 + "What colour is the door?", max_new_tokens=4)
    assert third.prefilled_tokens < third.prompt_tokens - 300
    smollm2.reset()
    fresh = smollm2.generate(document * 2 + "What colour is the door?", max_new_tokens=4)
    assert fresh.token_ids == third.token_ids


def test_closing_a_stream_frees_it_and_keeps_the_rest_whole(smollm2: LongSpec) -> None:
    expected = smollm2.generate(PROMPTS[2], max_new_tokens=12)
    smollm2.reset()
    stream = smollm2.stream(PROMPTS[2], max_new_tokens=40)
    piece = next(stream)
    assert expected.text.startswith(piece)
    # a request in between changes nothing
    assert smollm2.generate(PROMPTS[1], max_new_tokens=20).text == "The capital of France is Paris."
    piece += next(stream)
    stream.close()
    assert stream.result.finish_reason == "closed"
    assert stream.result.text.startswith(piece), "the engine may be ahead of who reads"
    assert list(stream) == []
    with smollm2.stream(PROMPTS[2]) as unread:
        pass
    assert (unread.result.finish_reason, unread.result.seconds, unread.result.tokens) == ("closed", 0.0, 0)
    sequence = weakref.ref(stream._sequence)
    del stream
    gc.collect()
    assert sequence() is None
    assert smollm2.engine.statistics.held_pages == 0
    after = smollm2.generate(PROMPTS[2], max_new_tokens=12)
    assert after.token_ids == expected.token_ids
    assert after.prefilled_tokens < after.prompt_tokens, "what the closed stream computed is still of use"


def test_another_thread_may_stop_a_stream(smollm2: LongSpec) -> None:
    with smollm2.stream(PROMPTS[2], max_new_tokens=600, eos_ids=()) as stream, ThreadPoolExecutor(1) as pool:
        first = next(stream)
        reading = pool.submit(list, stream)
        with pytest.raises(UserError, match="answers are being written"):
            smollm2.calibrate()
        stream.close()
        rest = reading.result(timeout=60)
    assert stream.result.finish_reason == "closed"
    assert 0 < stream.result.tokens < 600
    assert stream.result.text.startswith(first + "".join(rest))


def test_prompt_and_answer_may_fill_the_context_to_the_last_token(smollm2_folder: object) -> None:
    model = LongSpec.from_pretrained(str(smollm2_folder), max_length=48, calibrate=False)
    prompt = model.tokenizer("one two three four five six seven eight")["input_ids"]
    result = model.generate(prompt, max_new_tokens=48 - len(prompt))
    assert result.finish_reason in ("length", "eos")
    with pytest.raises(UserError, match=f"at most {48 - len(prompt)} new tokens fit"):
        model.generate(prompt, max_new_tokens=49 - len(prompt))
    with pytest.raises(UserError, match="the prompt has 60 tokens, but the context holds 48"):
        model.generate([1] * 60)
    with pytest.raises(UserError, match="max_length 9000"):
        LongSpec.from_pretrained(str(smollm2_folder), max_length=9000)


def test_chunked_prefill_changes_nothing(smollm2: LongSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "word " * 100 + "What was that?"
    whole = smollm2.generate(prompt, max_new_tokens=8)
    smollm2.reset()
    monkeypatch.setattr(chunks, "PLAIN_ALONE", 7)
    assert smollm2.generate(prompt, max_new_tokens=8).token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        ("", {}, "empty"),
        ("  \n", {}, "empty"),
        ([], {}, "empty"),
        ([1, 60000], {}, "60000"),
        ("Hi", {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ("Hi", {"temperature": -1.0}, "temperature is -1.0"),
        ("Hi", {"method": "magic"}, "'magic' is unknown"),
        ("Hi", {"stop": [""]}, "stop string is empty"),
        ("Hi", {"seed": -1}, "seed -1"),
        (["Hi", "Ho"], {"seed": [1]}, "1 seeds for 2 prompts"),
        ("Hi", {"tempurature": 1.0}, "'tempurature' is unknown"),
        ([{"role": "user"}], {}, "'role' and 'content'"),
    ],
)
def test_bad_requests_are_named(
    smollm2: LongSpec, prompt: object, options: dict[str, object], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        smollm2.generate(prompt, **options)  # type: ignore[call-overload]
