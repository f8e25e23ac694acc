"""What the server does not do: tokenise what cannot fit, wait for ever, answer for other hosts."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from longspec.cli.main import main
from longspec.prompts import PromptTooLong
from longspec.server.run import read_api_keys
from tests.server.live import Live, soon


def test_a_prompt_that_cannot_fit_is_refused_from_a_part(tiny_server: Callable[..., Live]) -> None:
    server = tiny_server()  # its context holds 2048 tokens
    encode, vocab_size = server.model.encoder.encode, server.model.maker.vocab_size

    def size_told(text: str, most: int) -> str | None:
        try:
            encode(text, True, vocab_size, most)
        except PromptTooLong as error:
            return error.size
        return None

    parts = (" ", "=", "\n", "a", "0", "日", "🎉", "hello world ", "def f(x):\n        return x\n", "\n \t")
    for part in (*parts, *(f"{' ' * 20_000}{one}" for one in parts)):
        for most in (1, 40, 700):
            for number in (most, 2 * most, 40 * most):
                text = "x" + (part * number)[:30_000]
                size = len(encode(text, True, vocab_size))
                told = (str(size), f"more than {most}") if size > most else (None,)
                assert size_told(text, most) in told
    url = f"{server.address}/v1"
    fits = httpx.post(f"{url}/completions", json={"prompt": "x" + " " * 128_000, "max_tokens": 4}, timeout=60)
    assert fits.status_code == 200, fits.text
    assert fits.json()["usage"]["prompt_tokens"] == 2001
    words = "hello world " * 700_000
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": words}]}),
        ("completions", {"prompt": words}),
        ("completions", {"prompt": [5] * 2_000_000}),
    ):
        begun = time.perf_counter()
        refused = httpx.post(f"{url}/{path}", json=body | {"max_tokens": 48}, timeout=60)
        assert time.perf_counter() - begun < 5
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
        assert re.search("the prompt has (more than 2000|2000000) tokens and 48 new ones", error["message"])


def test_clients_are_told_that_the_server_ends(tiny_server: Callable[..., Live]) -> None:
    server = tiny_server(grace_seconds=1)
    long: Any = {"model": server.model.name, "prompt": "word", "max_tokens": 2000, "n": 4}
    long["extra_body"] = {"ignore_eos": True, "method": "vanilla"}
    with ThreadPoolExecutor(2) as pool:
        stream = server.client().completions.create(**long, stream=True)
        next(stream)
        whole = pool.submit(lambda: server.client().completions.create(**long))
        assert soon(lambda: server.service.num_open == 8)
        server.front.end()
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the server is shutting down") as refused:
            whole.result()
        assert refused.value.status_code == 503
        assert refused.value.code == "shutting_down"
    assert soon(lambda: server.is_idle)


def test_a_client_that_never_reads_loses_its_connection(
    tiny_server: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspec.server.run._UNREAD", 1)
    server = tiny_server()
    body = {"prompt": "word", "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 20}
    text = json.dumps(body | {"temperature": 1, "max_seconds": 1})
    host, port = server.address.removeprefix("http://").split(":")
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        link.connect((host, int(port)))
        link.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
        )
        connections = server.front.server_state.connections
        assert soon(lambda: len(connections) == 1)
        assert soon(lambda: not connections, 20)
        assert soon(lambda: server.is_idle)


def test_without_a_key_only_local_names_are_answered(tiny_server: Callable[..., Live]) -> None:
    def statuses(server: Live, *hosts: str) -> set[int]:
        body, port = {"prompt": "word", "max_tokens": 1}, server.address.rpartition(":")[2]
        found = set()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for host in hosts:
                headers = {"Host": host.replace("PORT", port), "Authorization": "Bearer key"}
                found.add(client.post("/v1/completions", json=body, headers=headers).status_code)
                found |= {client.get(path, headers=headers).status_code for path in ("/", "/metrics")}
        return found

    here = ("localhost:PORT", "LOCALHOST", "127.0.0.1:PORT", "127.9.9.9", "[::1]:PORT", "a.localhost")
    elsewhere = ("evil.example", "evil.example:PORT", "127.0.0.1.evil.example", "10.0.0.1:PORT", "[::2]", "[")
    server = tiny_server()
    assert statuses(server, *here) == {200}
    assert statuses(server, *elsewhere) == {421}
    refused = httpx.get(f"{server.address}/v1/models", headers={"Host": "evil.example"})
    assert "'evil.example'" in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "unknown_host"
    assert statuses(tiny_server(keys=["key"]), *here, *elsewhere) == {200}
    assert statuses(tiny_server(address="0.0.0.0"), *here, *elsewhere) == {200}


def test_the_model_may_have_other_names(tiny_server: Callable[..., Live]) -> None:
    server = tiny_server(names=["gpt-4o", "org/small"])
    client = server.client()
    assert [model.id for model in client.models.list()] == ["gpt-4o", "org/small"]
    for name in ("gpt-4o", "org/small"):
        assert client.models.retrieve(name).id == name
        assert (client.models.retrieve(name).model_extra or {})["root"] == server.model.name
        assert client.completions.create(model=name, prompt="word", max_tokens=1).model == "gpt-4o"
    assert httpx.post(f"{server.address}/v1/completions", json={"prompt": "a"}).json()["model"] == "gpt-4o"
    for refused in (client.models.retrieve, lambda name: client.completions.create(model=name, prompt="a")):
        with pytest.raises(openai.NotFoundError, match="this server has 'gpt-4o', 'org/small'"):
            refused(server.model.name)
    assert 'model_name="gpt-4o"' in httpx.get(f"{server.address}/metrics").text


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["--api-key-file", "{}/missing"], "/missing': No such file or directory"),
        (["--api-key-file", "{}"], "Is a directory"),
        (["--api-key-file", "{}/latin"], "/latin': it is not UTF-8 text"),
        (["--api-key-file", "{}/comments"], "/comments' holds no key"),
        (["--grace-seconds", "-5"], "grace_seconds is -5"),
        (["--max-queue", "-1"], "max_queue is -1"),
    ],
)
def test_bad_settings_are_refused_in_one_line(
    arguments: list[str], about: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin").write_bytes(b"key\xff\n")
    (tmp_path / "comments").write_text("# one\n\n  # two\n")
    with contextlib.suppress(SystemExit):
        assert main(["serve", *(one.format(tmp_path) for one in arguments)]) == 2
    told = capsys.readouterr().err
    assert about in told
    assert told.count("\n") == 1
    if "--api-key-file" in arguments:
        assert "--api-key-file" in told


def test_comments_in_the_key_file_are_no_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# for the team\nfirst\n\n  second  \n#old\n")
    assert read_api_keys(str(keys)) == ["first", "second"]
