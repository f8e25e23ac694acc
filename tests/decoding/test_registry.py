"""A method from outside: one class, registered, is decoded with, benchmarked and described like our own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from longspec import LongSpec, UserError
from longspec.cli.main import main
from longspec.decoding.methods import Method, option, register, registry
from longspec.decoding.methods.registry import read_label
from longspec.decoding.round import Models
from longspec.decoding.slots import Slots
from longspec.decoding.tree import TokenTree


@dataclass(frozen=True)
class Echo(Method):
    """Proposes the newest token again and again."""

    name = "echo"
    summary = "the newest token, repeated"

    repeats: int = option(2, "how often the newest token is proposed again", least=1, most=9)

    @property
    def num_nodes(self) -> int:
        return self.repeats + 1

    def propose(self, models: Models, rows: Slots, sampled: bool) -> TokenTree:
        return TokenTree.chain(rows.roots[:, None].expand(-1, self.num_nodes).contiguous())


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> type[Method]:
    monkeypatch.setattr(registry, "_METHODS", dict(registry.methods()))
    return register(Echo)


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_it_says_what_vanilla_says(tiny: LongSpec, temperature: float) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "seed": 1}
    prompts = ["Once upon a time", "Say la la la la la la"]
    expected = tiny.generate(prompts, method="vanilla", **asked)
    found = tiny.generate(prompts, method="echo", **asked | {"repeats": 3})
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert {(one.method, one.label) for one in found} == {("echo", "echo:repeats=3")}
    wrong: dict[str, dict[str, Any]] = {
        "repeats is 10; it must lie between 1 and 9": {"method": "echo", "repeats": 10},
        "'vanilla' has no option 'repeats'; it is an option of echo": {"method": "vanilla", "repeats": 3},
    }
    for named, options in wrong.items():
        with pytest.raises(UserError, match=named):
            tiny.generate("Hi", **options)


@pytest.mark.usefixtures("echo")
def test_it_is_benchmarked(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Say la la la la"}))
    command = ["bench", "generate", "--target", str(tiny_folder), "--workload", str(prompts), "--json"]
    command += ["--methods", "echo:repeats=4", "--max-new-tokens", "12", "--repeats", "1"]
    assert main([*command, "--device", "cpu", "--output", str(tmp_path / "run")]) == 0
    figures = {one["method"]: one for one in json.loads(capsys.readouterr().out)["figures"]}
    assert figures.keys() == {"vanilla", "echo:repeats=4"}
    assert (figures["echo:repeats=4"]["compared"], figures["echo:repeats=4"]["different"]) == (1, 0)


@pytest.mark.usefixtures("echo")
def test_it_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "echo: the newest token, repeated" in shown
    assert "--repeats N echo: how often the newest token is proposed again (default: 2)" in shown


def test_methods_are_told_apart(echo: type[Method]) -> None:
    with pytest.raises(ValueError, match="there is a method 'echo' already"):
        register(echo)
    assert read_label("echo") == Echo() == Echo(2) != Echo(3)
    assert len({Echo(), Echo(2), Echo(3), *(cls() for cls in registry.choices().values())}) == 2 + 6
