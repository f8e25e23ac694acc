"""What users of the library give it: what has one meaning is taken, the rest is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longspec import LongSpec, UserError

IDS = [1000, 1001, 1002]


def test_a_prompt_has_many_forms(tiny: LongSpec) -> None:
    def ask(prompt: Any, **options: Any) -> list[int]:
        result = tiny.generate(prompt, max_new_tokens=3, **options)
        assert not isinstance(result, list)
        return result.token_ids

    expected = ask(IDS)
    for same in (tuple(IDS), np.array(IDS), torch.tensor(IDS), list(np.array(IDS)), list(torch.tensor(IDS))):
        assert ask(same, seed=np.int64(3), top_k=np.int32(5), stop=None) == expected
    message = {"role": "user", "content": "Hi"}
    assert ask("Hi") == ask(message) == ask([message])
    arrays: dict[str, Any] = {"max_new_tokens": np.int64(3), "seed": torch.tensor([1, 2])}
    both: Any = tiny.generate(torch.tensor([IDS, IDS]), **arrays)
    assert [row.token_ids for row in both] == [expected] * 2
    assert [row.seed for row in both] == [1, 2]
    assert [row.token_ids for row in tiny.generate(["Hi", IDS, [message]], max_new_tokens=3)] == [
        ask("Hi"),
        expected,
        ask("Hi"),
    ]


@pytest.mark.parametrize(
    ("prompt", "options", "named"),
    [
        (None, {}, "'NoneType': None"),
        (5, {}, "'int': 5"),
        (b"Hi", {}, "'bytes': b'Hi'"),
        ((part for part in ["Hi"]), {}, "'generator'"),
        (["Hi", None], {}, "mixes str"),
        ([1, "Hi"], {}, "mixes str"),
        ([{"role": "user", "content": "Hi"}, "Hi"], {}, "mixes dict, str"),
        ([1.5], {}, "a token id is 1.5"),
        ([True], {}, "a token id is True"),
        (torch.tensor([0.5]), {}, "a token id is 0.5"),
        ("\ud800", {}, r"not valid Unicode: it has '\\ud800'"),
        ([{"role": "user", "content": "\udcff"}], {}, "not valid Unicode"),
        ("Hi", {"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ("Hi", {"seed": 1.5}, "seed is 1.5"),
        ("Hi", {"seed": "1"}, "seed is '1'"),
        ("Hi", {"temperature": "0.5"}, "temperature is '0.5'"),
        ("Hi", {"top_k": 2.5}, "top_k is 2.5"),
        ("Hi", {"stop": [None]}, r"stop is \[None\]"),
        ("Hi", {"stop": b"x"}, "stop is b'x'"),
        ("Hi", {"eos_ids": 5}, "eos_ids is 5"),
        ("Hi", {"gamma": 2.5, "method": "lookup"}, "gamma is 2.5"),
        ("Hi", {"tree_shape": [2.5], "method": "tree"}, "one of tree_shape is 2.5"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(
    tiny: LongSpec, prompt: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        tiny.generate(prompt, **options)


def test_stream_takes_one_prompt_and_says_that_it_runs(tiny: LongSpec) -> None:
    with pytest.raises(UserError, match="got 2; use generate"):
        tiny.stream(["a", "b"])  # type: ignore[arg-type]
    stream = tiny.stream(torch.tensor(IDS), max_new_tokens=5, eos_ids=())
    next(stream)
    assert stream.result.finish_reason == "running"
    stream.close()
    assert stream.result.finish_reason == "closed"


def test_eos_ids_replace_the_models_own(tiny: LongSpec) -> None:
    free = tiny.generate(IDS, max_new_tokens=8, eos_ids=())
    assert (free.finish_reason, free.tokens) == ("length", 8)
    ended = tiny.generate(IDS, max_new_tokens=8, eos_ids=[free.token_ids[2]])
    assert ended.finish_reason == "eos"
    assert ended.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[2]) + 1]


def test_paths_and_torch_types_are_taken(tiny_folder: Path) -> None:
    model = LongSpec.from_pretrained(tiny_folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert model.target.dtype == torch.bfloat16
    assert model.generate(IDS, max_new_tokens=2).dtype == "bfloat16"
    sized = LongSpec.from_pretrained(tiny_folder, device="cpu:0", kv_memory="1MB", calibrate=False)
    assert sized.engine.models.pages.num_bytes <= 1_010_000
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"target": b"tiny"}, "target is b'tiny'"),
        ({"target": None}, "target is None"),
        ({"draft": 5}, "draft is 5"),
        ({"device": None}, "device None"),
        ({"dtype": torch.int8}, "dtype 'int8'"),
        ({"max_length": 9.5}, "max_length is 9.5"),
        ({"revision": "main"}, "leave out revision 'main'"),
        ({"kv_memory": "much"}, "'much' is not a size like 8GB"),
        ({"kv_memory": -1}, "kv_memory is -1; it must be at least 1 byte"),
        (
            {"kv_memory": "1KB"},
            r"a text of 2 tokens, .*, but kv_memory is 1.0 kB; give more kv_memory, or load",
        ),
        (
            {"kv_memory": "200KB", "max_length": 2000},
            r"kv_memory is 0.2 MB; lower max_length to \d+, or give",
        ),
        ({"max_rows": 10**8}, "max_rows is 100000000; it must lie between 1 and 65536"),
        ({"exact": True}, "exact is for our kernels, and they do not run bfloat16 on cpu"),
        ({"device": "cpu:5"}, "there is no device 'cpu:5'"),
    ]
    usual: dict[str, Any] = {"target": tiny_folder, "dtype": "bfloat16"}
    for arguments, named in wrong:
        with pytest.raises(UserError, match=named):
            LongSpec.from_pretrained(**(usual | arguments))


def test_the_package_lists_its_names() -> None:
    import longspec

    assert set(longspec.__all__) <= set(dir(longspec))


CONFIGS = [
    ({"num_attention_heads": 0}, "num_attention_heads = 0"),
    ({"num_key_value_heads": "2"}, "num_key_value_heads = '2'"),
    ({"num_key_value_heads": -2}, "num_key_value_heads = -2"),
    ({"head_dim": "8"}, "head_dim = '8'"),
    ({"head_dim": 8.0}, "head_dim = 8.0"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
    ({"rope_scaling": "linear", "rope_parameters": None}, "rope_scaling = 'linear'"),
    ({"rope_parameters": [1]}, r"rope_parameters = \[1\]"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor = 0"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": -1}}, "factor = -1"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 0}}, "rope_theta = 0"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}}, "rope_theta = 1"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": "abc"}}, "rope_theta is 'abc'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "beta_fast": "x"}}, "beta_fast is 'x'"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4}}, "low_freq_factor = 4"),
    ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": None}, "sliding_window = 4"),
    ({"layer_types": 5, "sliding_window": 4, "use_sliding_window": True}, "sliding_window = 4"),
    ({"quantization_config": "abc"}, "quantization_config = 'abc'"),
    ({"eos_token_id": "2"}, "eos_token_id is '2'"),
]
GENERATION_CONFIGS = [
    ({"eos_token_id": [[1]]}, r"eos_token_id is \[1\]"),
    ({"eos_token_id": "2"}, "eos_token_id is '2'"),
    ({"do_sample": True, "top_k": "50"}, "top_k is '50'"),
    ({"do_sample": True, "temperature": "0.7"}, "temperature is '0.7'"),
    ({"do_sample": True, "top_p": 0.0}, "top_p is 0.0"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0"),
]


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [("config.json", *case) for case in CONFIGS]
    + [("generation_config.json", *case) for case in GENERATION_CONFIGS],
)
def test_bad_model_files_are_named_with_their_bad_value(
    tiny_folder: Path, tmp_path: Path, name: str, change: dict[str, Any], named: str
) -> None:
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / name).read_text())
    (tmp_path / name).write_text(json.dumps(values | change))
    with pytest.raises(UserError, match=f"{tmp_path / name}: .*{named}") as error:
        LongSpec.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_without_tokenizer_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer: one of tokenizer\.json"):
        LongSpec.from_pretrained(tmp_path)
