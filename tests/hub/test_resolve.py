import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jinja2
import pytest

from longspec.errors import UserError
from longspec.hub import DEFAULT_TARGET, MODELS, nearest, resolve

COMMIT = "c" * 40
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same weights, pickled",
    "modeling_evil.py": b"raise SystemExit",
    "onnx/model.safetensors": b"another format",
}


def test_the_table() -> None:
    assert DEFAULT_TARGET in MODELS
    entry = MODELS["longchat7b"]
    assert (entry.target, entry.draft, entry.context) == (
        "lmsys/longchat-7b-v1.5-32k",
        "sail/longspec-longchat-7b-v1.5-32k",
        32768,
    )
    assert MODELS["llama8b"].eos_id == 128009
    assert nearest("Vicuna-7b") == "vicuna7b"
    assert nearest("zzz") is None


def test_vicuna_chat_template() -> None:
    template = jinja2.Environment().from_string(MODELS["vicuna7b"].chat_template or "")
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "Why?")]
    text = template.render(
        messages=[{"role": role, "content": content} for role, content in turns],
        bos_token="<s>",
        add_generation_prompt=True,
    )
    assert text == (
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives "
        "helpful, detailed, and polite answers to the user's questions. "
        "USER: Hi ASSISTANT: Hello</s>USER: Why? ASSISTANT:"
    )
    text = template.render(messages=[{"role": "system", "content": "Be brief."}], bos_token="<s>")
    assert text == "<s>Be brief. "


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve(str(folder))
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder)).folder == folder
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name").folder == Path("org/name")  # what exists goes before the hub
    (tmp_path / DEFAULT_TARGET).mkdir()  # no model in it, so it does not hide the name
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="offline"):
        resolve(DEFAULT_TARGET, offline=True)
    (tmp_path / "weights.txt").write_text("")
    for bad in ("weights.txt", "missing.gguf", "./missing", "/missing/folder"):
        with pytest.raises(UserError, match=Path(bad).name):
            resolve(bad)


@pytest.mark.parametrize(
    ("name", "said"),
    [("smolm2", "smollm2-135m"), ("", "known names"), ("zzz", "known names"), ("z" * 5000, "known names")],
)
def test_unknown_names(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve(name)


class FakeHub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a download takes."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, rest = parts[3], parts[4:]
        else:
            repo, rest = parts[1], parts[2:]
        if repo == "gated":
            return self.answer(403, b"gated", {"X-Error-Code": "GatedRepo"})
        if repo != "tiny":
            return self.answer(404, b"none", {"X-Error-Code": "RepoNotFound"})
        if rest[:1] in (["revision"], ["resolve"]) and rest[1] not in ("main", COMMIT):
            return self.answer(404, b"none", {"X-Error-Code": "RevisionNotFound"})
        if rest[:1] == ["resolve"]:
            content = FILES["/".join(rest[2:])]
            headers = {
                "ETag": f'"{len(content)}"',
                "X-Repo-Commit": COMMIT,
                "X-Linked-Size": str(len(content)),
            }
            return self.answer(200, content, headers)
        if rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": n, "size": len(c), "oid": str(len(c))} for n, c in FILES.items()
            ]
            return self.answer(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
        info = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
        return self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


# huggingface_hub reads its settings when it is imported, so each case is a process of its own.
SCRIPT = """
    import sys
    from longspec.errors import UserError
    from longspec.hub import ModelEntry, on_disk, resolve, resolve_tokenizer
    for case in sys.argv[1:]:
        name, _, revision = case.removeprefix("tokenizer of ").partition("@")
        try:
            how = resolve_tokenizer if case.startswith("tokenizer of ") else resolve
            found = how(name, revision=revision or None)
            names = sorted(p.name for p in found.folder.rglob("*"))
            print("found", *names, on_disk(ModelEntry("x", name, None, 1)), found.entry and found.entry.name)
        except UserError as error:
            print("error", error)
"""


def ask(endpoint: str, home: Path, *cases: str, **environment: str) -> list[str]:
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *cases],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


def test_hub_ids(tmp_path: Path, hub: str) -> None:
    tiny, again, revision, gated, nothing = ask(
        hub, tmp_path, "org/tiny", f"org/tiny@{COMMIT}", "org/tiny@v9", "org/gated", "org/nothing"
    )
    # No pickle beside safetensors, no code, nothing from sub-folders.
    assert tiny == "found config.json model.safetensors tokenizer.json True None"
    assert again == tiny
    assert revision == "error org/tiny has no revision 'v9'"
    assert gated.startswith("error org/gated is gated: accept its terms")
    assert nothing.startswith("error there is no model org/nothing on the hub")
    # With the network gone, or offline asked for, what is cached still works.
    unreachable = "http://127.0.0.1:9"
    cached, unknown = ask(unreachable, tmp_path, "org/tiny", "org/nothing")
    assert cached == tiny
    assert unknown.startswith("error cannot reach the hub for org/nothing: check the network")
    cached, unknown = ask(unreachable, tmp_path, "org/tiny", "org/nothing", HF_HUB_OFFLINE="1")
    assert cached == tiny
    assert "offline" in unknown


def test_the_tokenizer_alone_is_fetched_without_weights(tmp_path: Path, hub: str) -> None:
    (tiny,) = ask(hub, tmp_path, "tokenizer of org/tiny")
    assert tiny == "found config.json tokenizer.json False None"
    cached, unknown = ask("http://127.0.0.1:9", tmp_path, "tokenizer of org/tiny", "tokenizer of smolm2-135m")
    assert cached == tiny
    assert "did you mean 'smollm2-135m'?" in unknown


def test_a_published_target_is_known_by_its_hub_id_too(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--lmsys--vicuna-7b-v1.5-16k"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (repository / "snapshots" / COMMIT / name).write_bytes(FILES[name])
    cases = ("vicuna7b", "lmsys/vicuna-7b-v1.5-16k")
    for found in ask("http://127.0.0.1:9", tmp_path, *cases, HF_HUB_OFFLINE="1"):
        assert found.endswith(" vicuna7b")


def test_revisions_are_for_hub_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for target in (str(tmp_path), DEFAULT_TARGET):
        with pytest.raises(UserError, match="leave out revision 'v2'"):
            resolve(target, revision="v2")
