"""Versions of vLLM that are not installed: small stand-ins with the parts that the plugin looks for."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from longspec import UserError
from longspec.hub import resolve_draft
from longspec.vllm.handover import install
from longspec.vllm.plugin import register
from longspec.vllm.settings import PROPOSER


def stand_in(patch: pytest.MonkeyPatch, version: str, **modules: dict[str, Any]) -> None:
    """A package `vllm` with these modules; their names have "__" for "."."""
    package = ModuleType("vllm")
    package.__version__ = version  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "vllm", package)
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        patch.setitem(sys.modules, name.replace("__", "."), module)


class Arguments(SimpleNamespace):
    """As vLLM's `EngineArgs`, which gives what it was asked for."""

    def create_speculative_config(self, target: object) -> Any:
        return self.speculative_config


def test_an_unknown_version_warns_and_still_translates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = Arguments.create_speculative_config
    monkeypatch.setattr(Arguments, "create_speculative_config", original)  # to be put back at the end
    stand_in(monkeypatch, "0.99.0", vllm__engine__arg_utils={"EngineArgs": Arguments})
    register()
    register()  # vLLM may load a plugin more than once
    assert Arguments.create_speculative_config.__wrapped__ is original  # type: ignore[attr-defined]
    draft = str(resolve_draft("smollm2-135m"))
    ours = Arguments(speculative_config={"model": draft}, additional_config={"other": 1})
    assert ours.create_speculative_config("target")["model"] == PROPOSER
    assert ours.additional_config == {"other": 1, "longspec": {"draft": draft}}
    assert "tested with vLLM 0.25.0 and 0.32.0, and this is 0.99.0" in caplog.text
    flags = {"spec_method": "longspec", "spec_model": "smollm2-135m", "spec_tokens": 3}
    short = Arguments(speculative_config=None, additional_config=None, **flags)
    assert short.create_speculative_config("target")["num_speculative_tokens"] == 3
    assert not any(getattr(short, name) for name in flags), "vLLM would add them to our config"
    others = Arguments(speculative_config={"method": "ngram"}, additional_config={})
    assert others.create_speculative_config("target") == {"method": "ngram"}
    assert others.additional_config == {}


def test_a_vllm_without_the_interface_is_left_alone_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    stand_in(monkeypatch, "9.0.0", vllm__engine__arg_utils={"EngineArgs": SimpleNamespace})
    register()
    assert "longspec drafts cannot be used with this vLLM" in caplog.text

    class Runner:
        def propose_draft_token_ids(self, sampled_token_ids: Any, sample_hidden_states: Any) -> None: ...

    stand_in(monkeypatch, "9.0.0", vllm__v1__worker__gpu_model_runner={"GPUModelRunner": Runner})
    with pytest.raises(UserError, match="has no spec_decode_metadata, common_attn_metadata"):
        install()
