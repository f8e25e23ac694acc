import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from longspec.errors import UserError
from longspec.hub import cache_dir, gguf_convert, resolve
from longspec.models.checkpoint import WeightFiles
from longspec.models.files import read_config
from tests.hub.gguf_samples import HEAD_DIM, SPM_TOKENS, write_gguf

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
Extra = Callable[[gguf.GGUFWriter], None]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPEC_CACHE", str(tmp_path / "cache"))


def converted(path: Path) -> Path:
    return resolve(str(path)).folder


def config_of(tmp_path: Path, arch: str = "llama", extra: Extra | None = None) -> Any:
    """The converted file's config, which must be what the header alone told before."""
    write_gguf(tmp_path / "m.gguf", arch, extra=extra)
    files = resolve(str(tmp_path / "m.gguf"), config_only=True)
    told = read_config(files.folder, files.config)
    assert files.folder == tmp_path / "m.gguf", "nothing is converted for that"
    folder = converted(tmp_path / "m.gguf")
    assert read_config(folder) == told
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("kind", TYPES)
def test_llama_weights_come_out_in_hugging_face_order(tmp_path: Path, kind: str) -> None:
    tied = kind in ("F16", "Q4_1", "Q6_K")
    expected = write_gguf(tmp_path / "m.gguf", "llama", kind, tied=tied)
    stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    types = resolve(str(tmp_path / "m.gguf"), config_only=True).matrix_types
    assert set(types) == {{"F16": "float16", "BF16": "bfloat16"}.get(kind, kind)}
    with WeightFiles(converted(tmp_path / "m.gguf")) as weights:
        assert weights.names == expected.keys()
        assert weights.tensor("model.embed_tokens.weight").dtype == stored
        for name, values in expected.items():
            assert np.array_equal(weights.tensor(name).float().numpy(), values), name


@pytest.mark.parametrize(("arch", "kind"), [("llama", "Q8_0"), ("qwen2", "Q4_1"), ("qwen3", "F16")])
@pytest.mark.parametrize("tied", [True, False])
def test_same_model_as_transformers_reads_from_the_file(
    tmp_path: Path, arch: str, kind: str, tied: bool
) -> None:
    write_gguf(tmp_path / "m.gguf", arch, kind, tied=tied)
    ours = AutoModelForCausalLM.from_pretrained(converted(tmp_path / "m.gguf"), dtype=torch.float32)
    # from_pretrained(gguf_file=...) does this too, but only with accelerate installed.
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    config.head_dim = HEAD_DIM  # transformers leaves Qwen3's at its default
    make_model: Any = AutoModelForCausalLM.from_config
    theirs = make_model(config)
    load: Any = load_gguf_checkpoint
    state = load(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=theirs)["tensors"]
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
    theirs.tie_weights()
    assert type(ours) is type(theirs)
    assert ours.config.tie_word_embeddings is tied
    tokens = torch.tensor([[258, 3, 77, 256, 12]])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-6)


def test_config_and_manifest(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3", tied=False)
    folder = converted(tmp_path / "m.gguf")
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.architectures) == ("qwen3", ["Qwen3ForCausalLM"])
    assert (config.head_dim, config.max_position_embeddings) == (HEAD_DIM, 512)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    # eos from its key, the end of turn from its name
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [259, 260]
    manifest = json.loads((folder / "longspec.json").read_text())
    assert (manifest["source"], manifest["license"]) == ("m.gguf", "apache-2.0")


def test_rope_scaling(tmp_path: Path) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    rope = config_of(tmp_path, extra=linear).rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)
    rope = config_of(tmp_path, "qwen2", yarn).rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 4.0)
    assert rope["original_max_position_embeddings"] == 128


def llama3_divisors(factor: float, low: float, high: float) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter writes into rope_freqs.weight."""
    divisors = []
    for exponent in np.arange(0, HEAD_DIM, 2) / HEAD_DIM:
        wavelength = 2 * np.pi * 500000.0**exponent
        if wavelength < 8192 / high:
            divisors.append(1.0)
        elif wavelength > 8192 / low:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama3_rope_is_recovered_from_its_frequencies(tmp_path: Path) -> None:
    def add(divisors: np.ndarray[Any, Any]) -> Extra:
        return lambda writer: writer.add_tensor("rope_freqs.weight", divisors)

    rope = config_of(tmp_path, extra=add(llama3_divisors(32.0, 1.0, 4.0))).rope_parameters
    assert rope == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    ones = np.ones(HEAD_DIM // 2, dtype=np.float32)
    assert config_of(tmp_path, extra=add(ones)).rope_parameters["rope_type"] == "default"
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        config_of(tmp_path, extra=add(llama3_divisors(8.0, 2.0, 4.0)))


def test_byte_level_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    # What lies beside the file must not change what it means.
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "hi"}')
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path / "m.gguf"))
    assert tokenizer("hi hi<|end|>").input_ids == [258, 256, 257, 259]  # bos first, as the file asks
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "hi<|end|>"
    write_gguf(tmp_path / "q.gguf", "qwen2")
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path / "q.gguf"))
    assert tokenizer("hi hi").input_ids == [256, 257]
    assert tokenizer.decode(tokenizer("e\u0301").input_ids) == "\u00e9"  # Qwen normalises to NFC


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer="llama")
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path / "m.gguf"))
    ids = tokenizer("hi hi").input_ids
    assert [SPM_TOKENS[i] for i in ids] == ["<s>", "▁hi", "▁hi"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi hi"


def test_shards_and_storage_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_convert, "_SHARD_BYTES", 300_000)
    monkeypatch.setattr(gguf_convert, "_MAX_FLOAT32_BYTES", 1000)
    monkeypatch.setattr(gguf_convert, "_CHUNK_ELEMENTS", 1000)
    expected = write_gguf(tmp_path / "m.gguf", kind="Q8_0")
    assert resolve(str(tmp_path / "m.gguf"), config_only=True).matrix_types.keys() == {"bfloat16"}
    folder = converted(tmp_path / "m.gguf")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert (folder / shards[0]).stat().st_mode == (folder / "config.json").stat().st_mode
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    with WeightFiles(folder) as weights:
        assert weights.tensor("model.embed_tokens.weight").dtype == torch.bfloat16
        for name, values in expected.items():
            assert torch.equal(weights.tensor(name).bfloat16(), torch.from_numpy(values).bfloat16()), name


def test_conversion_is_cached_until_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    folder = converted(path)
    before = (folder / "model.safetensors").stat()
    assert converted(path) == folder
    assert (folder / "model.safetensors").stat() == before
    os.utime(path, ns=(1, 1))
    assert converted(path) != folder


@pytest.mark.parametrize(
    ("arch", "kind", "extra", "named"),
    [
        ("gemma", "F32", None, "'gemma'"),
        ("llama", "TQ2_0", None, "TQ2_0"),
        (
            "llama",
            "F32",
            lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", np.ones(8, np.float32)),
            "ffn_gate_inp",
        ),
        ("llama", "F32", lambda w: w.add_expert_count(8), "expert_count"),
        ("llama", "F32", lambda w: w.add_sliding_window(128), "sliding_window"),
        ("llama", "F32", lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "longrope"),
        ("llama", "F32", lambda w: w.add_rope_dimension_count(32), "rope.dimension_count"),
        ("llama", "F32", lambda w: w.add_uint16("split.count", 2), "split"),
        ("llama", "F32", lambda w: w.add_eot_token_id(100000), "eot_token_id"),
    ],
)
def test_refused_by_name(tmp_path: Path, arch: str, kind: str, extra: Extra | None, named: str) -> None:
    write_gguf(tmp_path / "m.gguf", arch, kind, extra=extra)
    with pytest.raises(UserError) as error:
        converted(tmp_path / "m.gguf")
    assert named in str(error.value)
    assert "\n" not in str(error.value)
    assert [path.name for path in (cache_dir() / "gguf").iterdir()] == [".lock"]  # nothing half-written stays


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, kind="Q8_0")
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.attn_v.weight")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7c"  # a block's scale becomes inf
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"blk\.1\.attn_v\.weight.*not finite"):
        converted(path)
