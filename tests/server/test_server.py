"""The server as clients meet it: the real target, real connections, OpenAI's own client."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from openai import OpenAI

from longspec import LongSpec
from longspec.cli.main import main
from longspec.server.service import Limits
from tests.server.live import Live, live, soon

MODEL = "smollm2-135m"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Tell me a short story about a fox."}]


@pytest.fixture(scope="module")
def server(_loaded: LongSpec) -> Iterator[Live]:
    # What `auto` takes where nothing was measured is a large tree, which a CPU is slow with.
    with live(_loaded, method="seq", gamma=3) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Live) -> OpenAI:
    return server.client()


def test_the_words_are_those_of_generate_whoever_else_is_served(server: Live, client: OpenAI) -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.0, "seed": 11, "top_p": 0.9, "extra_body": {"top_k": 40, "min_p": 0.02}},
        {"temperature": 0.7, "seed": 5, "extra_body": {"repetition_penalty": 1.2, "method": "lookup"}},
        {"temperature": 0.9, "seed": 7, "extra_body": {"method": "vanilla"}},
        {"temperature": 0.8, "seed": 3, "logprobs": True},
    ]

    def ask(index: int) -> str:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION if index % 2 else STORY, max_tokens=8, **asked[index]
        )
        assert answer.choices[0].message.content
        return answer.choices[0].message.content

    with ThreadPoolExecutor(len(asked)) as pool:
        texts = list(pool.map(ask, range(len(asked))))
    for index, (text, options) in enumerate(zip(texts, asked, strict=True)):
        given = {k: v for k, v in (options | options.get("extra_body", {})).items() if k != "extra_body"}
        given.pop("logprobs", None)
        prompt = (QUESTION if index % 2 else STORY)[0]["content"]
        alone = server.model.generate(prompt, max_new_tokens=8, **given | {"method": "vanilla"})
        assert text == alone.text
    assert server.is_idle


def test_a_stream_says_the_same_and_ends_as_openai_says(server: Live, client: OpenAI) -> None:
    server.model.reset()
    options: Any = {"model": MODEL, "messages": STORY, "max_tokens": 12, "temperature": 0.9, "seed": 2}
    whole = client.chat.completions.create(**options)
    more: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options=more))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[1:-1]] == [None] * (len(chunks) - 3) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert chunks[-1].choices == []
    assert usage.completion_tokens == whole.usage.completion_tokens == 12
    # The prompt was there already, but for what is not a whole page.
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16

    body = {"messages": STORY, "max_tokens": 12, "temperature": 0.9, "seed": 2, "stream": True}
    body["stream_options"] = {"continuous_usage_stats": True}
    raw = httpx.post(f"{server.address}/v1/chat/completions", json=body | {"explain": True}, timeout=60)
    assert raw.headers["content-type"].startswith("text/event-stream")
    events = raw.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    told = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    tokens = [token for one in told for token in one.get("tokens", [])]
    assert "".join(token["text"] for token in tokens) == whole.choices[0].message.content
    assert [one["usage"]["completion_tokens"] for one in told[1:]][-1] == 12
    figures = told[-1]["metrics"]["speculative_decoding"]
    assert sum(token["depth"] > 0 for token in tokens) == figures["num_accepted_draft_tokens"] > 0
    assert figures == whole.metrics["speculative_decoding"]
    histogram, steps = figures["acceptance_histogram"], figures["num_spec_steps"]
    assert sum(histogram) == steps
    assert sum(k * count for k, count in enumerate(histogram)) == figures["num_accepted_draft_tokens"]
    assert figures["mean_acceptance_length"] == 1 + figures["num_accepted_draft_tokens"] / steps
    assert told[-1]["choices"][0]["finish_reason"] == "length"  # and no chunk without a choice


def test_plain_completions_take_several_prompts_and_choices(server: Live, client: OpenAI) -> None:
    ids = server.model.tokenizer("One two three")["input_ids"]
    answer = client.completions.create(
        model=MODEL, prompt=["One two three", "Once upon a"], n=2, seed=4, temperature=1, max_tokens=3
    )
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    rows = ["One two three", "One two three", "Once upon a", "Once upon a"]
    alone = server.model.generate(rows, raw=True, seed=4, temperature=1, max_new_tokens=3, method="vanilla")
    assert texts == [one.text for one in alone]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(one.prompt_tokens for one in alone[::2])
    by_ids = client.completions.create(model=MODEL, prompt=ids, seed=4, temperature=1, max_tokens=3)
    assert by_ids.choices[0].text == texts[0]
    parts: dict[int, str] = {}
    for chunk in client.completions.create(
        model=MODEL, prompt=rows[::2], n=2, seed=4, temperature=1, max_tokens=3, stream=True
    ):
        one = chunk.choices[0]
        parts[one.index] = parts.get(one.index, "") + one.text
    assert [parts[index] for index in range(4)] == texts


def test_stop_strings_limits_and_eos(server: Live, client: OpenAI) -> None:
    def ask(**options: Any) -> Any:
        return client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, **options)

    whole = ask()
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    cut = ask(stop=["Germany", " is Par"])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("The capital of France", "stop")
    streamed = list(ask(stop=" is Par", stream=True, extra_body={"explain": True}))
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == "The capital of France"
    tokens = [token["text"] for chunk in streamed for token in chunk.model_extra.get("tokens", [])]
    assert "".join(tokens) == "The capital of France"
    assert ask(max_completion_tokens=3).choices[0].finish_reason == "length"
    longer = ask(max_tokens=12, extra_body={"ignore_eos": True})
    assert longer.usage.completion_tokens == 12


def test_logprobs(server: Live, client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3
    )
    told = chat.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert "".join(one.token for one in told.content) == chat.choices[0].message.content
    for one in told.content:
        assert bytes(one.bytes or []).decode() == one.token
        assert len(one.top_logprobs) == 3
        assert (one.token, one.logprob) == (one.top_logprobs[0].token, one.top_logprobs[0].logprob)
        assert sum(math.exp(top.logprob) for top in one.top_logprobs) <= 1
    streamed = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [one for part in parts if part for one in part.content or []] == told.content

    plain = client.completions.create(model=MODEL, prompt="One two", temperature=0, logprobs=2, max_tokens=5)
    found = plain.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert "".join(found.tokens) == plain.choices[0].text
    assert found.text_offset == [len("".join(found.tokens[:place])) for place in range(5)]
    assert found.top_logprobs is not None
    assert found.token_logprobs == [max(top.values()) for top in found.top_logprobs]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_the_logprobs_of_a_completion_fit_its_text(client: OpenAI, temperature: float) -> None:
    options: Any = {"model": MODEL, "temperature": temperature, "seed": 0, "logprobs": 2, "max_tokens": 16}
    options["prompt"] = "Repeat: 🎉日本🎉日本🎉日本🎉日本🎉"
    choice = client.completions.create(**options).choices[0]
    (told,) = _streamed_choices(client, options)
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert found.top_logprobs is not None
    assert found.token_logprobs is not None
    assert told == {"text": choice.text, "tokens": found.tokens, "text_offset": found.text_offset}
    assert "".join(found.tokens) == choice.text
    for text, offset in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text[offset:].startswith(text)
    assert "" in found.tokens, "no character of several tokens"
    is_new = []
    for text, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[text] == logprob
        others = [value for name, value in top.items() if name != text]
        assert others == sorted(others, reverse=True)
        is_new.append(all(logprob < other for other in others))
        assert len(top) <= 3
    assert any(is_new) == (temperature > 0), "whether a token is not among the most probable ones"


def test_of_tokens_that_are_spelled_alike_the_most_probable_is_told(server: Live) -> None:
    body = {"prompt": "Repeat: 🎉日本🎉日本🎉日本🎉日本", "temperature": 0, "max_tokens": 6}
    url = f"{server.address}/v1/completions"
    told = [httpx.post(url, json=body | {"logprobs": n}, timeout=60).json() for n in (4, 20)]
    few, many = (one["choices"][0]["logprobs"]["top_logprobs"] for one in told)
    assert any("\N{REPLACEMENT CHARACTER}" in top for top in few), "no part of a character"
    assert any(len(top) < 20 for top in many), "no two are spelled alike"
    assert all(here.items() <= there.items() for here, there in zip(few, many, strict=True))


def _streamed_choices(client: OpenAI, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The text, tokens and offsets of each choice, put together from a stream."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in client.completions.create(**options, stream=True):
        for one in chunk.choices:
            whole = found.setdefault(one.index, {"text": "", "tokens": [], "text_offset": []})
            whole["text"] += one.text
            if one.logprobs is not None:
                whole["tokens"] += one.logprobs.tokens or []
                whole["text_offset"] += one.logprobs.text_offset or []
    return list(found.values())


def test_answers_keep_to_a_schema(server: Live, client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "people": {"type": "integer", "minimum": 0, "maximum": 9999},
        },
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    options: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 40}
    said = set()
    for seed in (1, 2):
        sampled = client.chat.completions.create(**options, response_format=wanted, temperature=1, seed=seed)
        assert sampled.choices[0].finish_reason == "stop"
        found = json.loads(sampled.choices[0].message.content or "")
        assert set(found) == {"city", "people"}
        assert isinstance(found["people"], int)
        said.add(sampled.choices[0].message.content)
    assert len(said) == 2
    both = client.chat.completions.create(**options, response_format=wanted, temperature=1, seed=1, n=2)
    assert {choice.message.content for choice in both.choices} == said, "one grammar, and a state for each"
    # The words do not depend on the method that was asked for, nor on a stream.
    chunks = client.chat.completions.create(
        **options, response_format=wanted, temperature=1, seed=2, stream=True, extra_body={"method": "lookup"}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) in said
    options["max_tokens"] = 4
    anything = client.chat.completions.create(
        **options, response_format={"type": "json_object"}, temperature=0
    )
    assert (anything.choices[0].message.content or "").startswith("{")


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": []}, 400, "messages"),
    ({}, 400, "messages"),
    ({"messages": "hello"}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "a"}] * 10_001}, 400, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "role"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, 400,
     "messages.0.tool_calls is not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "text"),
    ({"tools": [{"type": "function"}]}, 400, "tools is not supported"),
    ({"logit_bias": {"5": 100}}, 400, "logit_bias is not supported"),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty is not supported"),
    ({"audio": {}}, 400, "audio is not supported"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"seed": 2**63}, 400, "seed"),
    ({"seed": True}, 400, "seed"),
    ({"n": 0}, 400, "n: Input"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 9000}, 400, "8192"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens"),
    ({"stop": ["a", ""]}, 400, "stop"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, 400, "stream"),
    ({"method": "guess"}, 400, "method 'guess' is unknown"),
    ({"max_seconds": 0}, 400, "max_seconds"),
    ({"model": "gpt-4"}, 404, "gpt-4"),
    ({"response_format": {"type": "json_schema"}}, 400, "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "dog"}}}}, 400, "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, 400,
     "the schema cannot be followed: NoExtensionBias"),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "context holds 8192 tokens"),
    ({"messages": [{"role": "user", "content": "word " * 90_000}]}, 400, "has more than 8191 tokens"),
    ({"min_tokens": 5}, 400, "min_tokens is not supported"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, 400,
     "stream_options.include_obfuscation is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "about"), BAD)
def test_what_cannot_be_done_is_refused(
    server: Live, change: dict[str, Any], status: int, about: str
) -> None:
    body = {"messages": QUESTION} | change if change else {}
    answer = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert about in error["message"]
    assert "<state>" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    if "is not supported" in about:
        assert (error["param"], error["code"]) == (about.split()[0], "unsupported_parameter")
    assert server.is_idle


def test_neutral_values_ask_for_nothing(server: Live, client: OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2)
    said = first.choices[0].message.model_dump()  # with annotations, refusal, tool_calls and more, all None
    asked = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    body = {
        "messages": [asked | {"name": "bob"}, said | {"annotations": [], "tool_calls": []}, asked],
        "tools": [], "tool_choice": "auto", "logit_bias": None, "frequency_penalty": 0, "user": "me",
        "presence_penalty": 0.0, "max_tokens": 2, "stop": None, "response_format": {"type": "text"},
        "top_k": -1, "store": True, "metadata": {"a": "b"}, "prompt_cache_key": "a", "safety_identifier": "b",
        "service_tier": "auto", "min_tokens": 0, "length_penalty": 1.0, "skip_special_tokens": True,
        "add_generation_prompt": True, "use_beam_search": False, "temperature": 0,
    }  # fmt: skip
    answer = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    plain: dict[str, Any] = {"messages": [asked, {"role": "assistant", "content": said["content"]}, asked]}
    plain |= {"max_tokens": 2, "temperature": 0}
    same = httpx.post(f"{server.address}/v1/chat/completions", json=plain, timeout=60).json()
    assert same["choices"] == answer.json()["choices"]
    assert same["usage"]["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    chunks = client.completions.create(
        model=MODEL, prompt="Hi", suffix="", max_tokens=2, stream=True,
        stream_options={"include_obfuscation": False},
    )  # fmt: skip
    assert list(chunks)[-1].choices[0].finish_reason == "length"


def test_errors_are_what_openais_client_expects(server: Live, tiny_server: Callable[..., Live]) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-3)
    with pytest.raises(openai.NotFoundError, match=f"does not exist; this server has '{MODEL}'"):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    unknown = httpx.get(f"{server.address}/v1/chat/completions")
    assert (unknown.status_code, unknown.headers["allow"]) == (405, "POST")
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    about = client.models.retrieve(MODEL).model_extra or {}
    assert (about["weights"], about["kv_dtype"]) == ("float32", "float32")
    locked = tiny_server(keys=["one", "second-key"])
    for wrong in ("none", "second-ke", ""):
        with pytest.raises((openai.AuthenticationError, openai.OpenAIError)):
            locked.client(wrong).models.list()
    assert locked.client("second-key").models.list().data
    unknown = httpx.get(f"{locked.address}/v1/models")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (401, "invalid_api_key")
    page = httpx.get(locked.address)
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(server: Live, stream: bool) -> None:
    engine = server.model.engine
    body = {
        "messages": STORY, "max_tokens": 4000, "ignore_eos": True, "stream": stream, "method": "vanilla",
    }  # fmt: skip
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as link:
        text = json.dumps(body)
        link.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
        )
        if stream:
            assert b"200" in link.recv(100)
        assert soon(lambda: any(seat.sequence.tokens for seat in engine.scheduler.seats.values()))
        (seat,) = engine.scheduler.seats.values()
    left, said = time.perf_counter(), len(seat.sequence.tokens)
    assert soon(lambda: server.is_idle)
    # What came after it left was said in the time that the news took, and in the round under way.
    per_token = (left - seat.sequence.first_at) / said
    assert len(seat.sequence.tokens) - said <= 3 + (seat.sequence.finished_at - left) / per_token * 2
    assert seat.sequence.finished_at - left < 1


def test_a_head_without_end_is_refused(server: Live) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: ")
        with pytest.raises(ConnectionError):
            link.sendall(b"a" * 65_536_000)
    ask = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    ask += b"2\r\n{}\r\n0\r\n"
    for trailer in (b"a" * 10_000, b"A: " + b"a" * 1000 + b"\r\n"):
        with socket.create_connection((host, int(port)), timeout=60) as link:
            link.sendall(ask)
            with pytest.raises(ConnectionError):
                link.sendall(trailer * 10_000)
    usual = httpx.get(f"{server.address}/health", headers={"A": "a" * 60_000})
    assert usual.status_code == 200


def test_the_queue_is_bounded(tiny_server: Callable[..., Live]) -> None:
    server = tiny_server(Limits(max_queue=1, max_body=10_000))
    url = f"{server.address}/v1/completions"
    long = {"prompt": "word", "max_tokens": 300, "ignore_eos": True, "method": "vanilla"}
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(httpx.post, url, json=long, timeout=60) for _ in range(2)]
        assert soon(lambda: server.service.num_open == 2)
        with pytest.raises(openai.RateLimitError, match="queue is full") as refused:
            server.client().completions.create(model=server.model.name, prompt="word")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert [one.result().status_code for one in first] == [200, 200]
    # These could never be taken on. Of many prompts none is tokenised.
    assert httpx.post(url, json=long | {"n": 3}).json()["error"]["param"] == "n"
    many = httpx.post(url, json=long | {"prompt": ["x"] * 1000})
    assert (many.status_code, many.json()["error"]["param"]) == (400, "prompt")
    assert httpx.post(url, json=long | {"max_tokens": 2}).status_code == 200
    assert httpx.post(url, json=long | {"prompt": "x" * 10_000}).status_code == 413
    assert (
        httpx.post(url, content=json.dumps(long), headers={"Content-Type": "text/plain"}).status_code == 415
    )
    told = httpx.get(f"{server.address}/metrics").text
    assert 'longspec:request_refused_total{model_name="' in told
    assert re.search(r"longspec:num_requests_running\{[^}]*\} 0", told)


def test_a_deadline_ends_an_answer(tiny_server: Callable[..., Live]) -> None:
    server = tiny_server(Limits(max_seconds=30))
    client = server.client()
    options: Any = {"model": server.model.name, "prompt": "word", "max_tokens": 1900}
    extra = {"ignore_eos": True, "max_seconds": 0.2, "method": "vanilla"}
    with pytest.raises(openai.InternalServerError, match=r"longer than 0\.2 s"):
        client.completions.create(**options, extra_body=extra)
    with pytest.raises(openai.APIError, match=r"longer than 0\.2 s"):
        list(client.completions.create(**options, extra_body=extra, stream=True))
    assert soon(lambda: server.is_idle)


def test_a_failing_engine_is_told_and_gets_over_it(
    tiny_server: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tiny_server()
    options: Any = {"model": server.model.name, "prompt": "word", "max_tokens": 4}

    def fails(*_: Any) -> None:
        raise RuntimeError("a broken device")

    with monkeypatch.context() as patch:
        patch.setattr(server.model.engine.device, "round", fails)
        with pytest.raises(openai.InternalServerError, match="RuntimeError"):
            server.client().completions.create(**options)
        assert httpx.get(f"{server.address}/health").status_code == 503
    # What no request can change is no request's fault, and a request that is refused is no good sign.
    table = server.model.target.embedding
    kept = table.clone()
    table.fill_(torch.inf)
    server.model.reset()
    for request in (options, options | {"logprobs": 1}):
        with pytest.raises(openai.InternalServerError, match="scores are not finite"):
            server.client().completions.create(**request)
    with pytest.raises(openai.BadRequestError):
        server.client().completions.create(**options | {"max_tokens": 9000})
    assert httpx.get(f"{server.address}/health").status_code == 503
    table.copy_(kept)
    assert server.client().completions.create(**options).choices[0].text
    assert httpx.get(f"{server.address}/health").status_code == 200


def test_tokens_are_counted_while_they_come(tiny_server: Callable[..., Live]) -> None:
    server = tiny_server()

    def counted() -> int:
        told = httpx.get(f"{server.address}/metrics").text
        (value,) = re.findall(r"^longspec:generation_tokens_total\{[^}]*\} (\S+)$", told, re.M)
        return int(float(value))

    options: Any = {"model": server.model.name, "prompt": "word", "max_tokens": 1500, "stream": True}
    options["extra_body"] = {"ignore_eos": True, "method": "vanilla"}
    with server.client().completions.create(**options) as stream:
        next(stream)
        assert soon(lambda: 0 < counted() < 1500)
        assert server.service.num_open == 1
        list(stream)
    assert soon(lambda: counted() == 1500)
    assert counted() == 1500


def test_metrics_have_the_names_that_dashboards_know(server: Live, client: OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=12, extra_body={"method": "seq"})
    told = httpx.get(f"{server.address}/metrics").text
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "generation_tokens_total"),
        *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
        *("e2e_request_latency_seconds_bucket", "request_success_total"),
        *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
        *("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
    ):
        found = re.search(rf"^longspec:{name}\{{[^}}]*model_name=\"{MODEL}\".*\}} (\S+)$", told, re.M)
        assert found, name


def test_the_command_serves_what_it_prints_and_finishes_before_it_ends(smollm2: LongSpec) -> None:
    command = [sys.executable, "-m", "longspec"]
    with subprocess.Popen(
        [*command, "serve", "--port", "0", "--no-calibrate", "--max-rows", "2", "--method", "seq"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(4)]
            address = lines[1].split()[0]
            line = "".join(lines[2:]).replace("\\\n", " ").replace("}]}'", '}], "max_tokens": 16}\'')
            assert shlex.split(line)[0] == "curl"
            done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
            said = json.loads(done.stdout)["choices"][0]["message"]["content"]
            assert said == smollm2.generate("Why is the sky blue?", max_new_tokens=16, method="vanilla").text
            assert main(["serve", "--port", address.split(":")[-1]]) == 2  # before anything is loaded
            body = {"messages": STORY, "max_tokens": 30, "stream": True, "temperature": 0}
            with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=60) as answer:
                events = answer.iter_text()
                assert next(events)
                process.send_signal(signal.SIGTERM)
                assert "".join(events).endswith("data: [DONE]\n\n")
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_the_load_client_counts_what_the_server_said(
    tiny_server: Callable[..., Live], tmp_path: Path
) -> None:
    server, out = tiny_server(), tmp_path / "load.json"
    script = Path(__file__).parents[2] / "benchmarks" / "serve_load.py"
    command = [
        sys.executable,
        str(script),
        "--url",
        server.address,
        "--concurrency",
        "1,2",
        "--json",
        str(out),
    ]
    options = ["--requests", "3", "--max-tokens", "5", "--ignore-eos", "--processes", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for line in json.loads(out.read_text())["levels"]:
        assert (line["requests"], line["errors"], line["tokens"]) == (3, 0, 15)
        assert 0 < line["first_token"]["p50"] <= line["whole"]["p50"] <= line["whole"]["p99"]


@pytest.mark.full
@pytest.mark.parametrize(
    "command", [(sys.executable, "examples/openai_client.py"), ("sh", "examples/curl.sh")]
)
def test_the_examples(server: Live, command: tuple[str, str]) -> None:
    root, environment = Path(__file__).parents[2], os.environ | {"LONGSPEC_URL": server.address}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "The capital of France is Paris" in done.stdout or "longspec:num_requests_running" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("victim", ["the engine", "the front"])
def test_neither_process_outlives_the_other(tiny_folder: Path, victim: str) -> None:
    command = [sys.executable, "-m", "longspec", "serve", "--port", "0", "--no-calibrate"]
    with subprocess.Popen(
        [*command, "--target", str(tiny_folder), "--method", "vanilla"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        address = process.stdout.readline().split()[0]
        engine = psutil.Process(process.pid)
        (front,) = [one for one in engine.children() if "spawn_main" in " ".join(one.cmdline())]
        body = {"prompt": "word", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            parts = answer.iter_text()
            assert next(parts)
            (engine if victim == "the engine" else front).kill()
            with contextlib.suppress(httpx.RemoteProtocolError):
                assert "EngineLost" in "".join(parts)
        assert soon(lambda: not front.is_running() or front.status() == psutil.STATUS_ZOMBIE, 20)
        assert process.wait(20) == (2 if victim == "the front" else -signal.SIGKILL)
