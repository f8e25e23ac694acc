from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from longspec import LongSpec
from longspec.hub import DEFAULT_TARGET, resolve

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of ranks come first: a process that has trained keeps DeepSpeed's group of processes."""
    items.sort(key=lambda item: item.path.name != "test_ranks.py")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The default target on disk, fetched once."""
    return resolve(DEFAULT_TARGET).folder


@pytest.fixture(scope="session")
def _loaded(smollm2_folder: Path) -> LongSpec:
    return LongSpec.from_pretrained(DEFAULT_TARGET, dtype="float32", device="cpu", calibrate=False)


@pytest.fixture
def smollm2(_loaded: LongSpec) -> LongSpec:
    """The default target in fp32 on the CPU, holding nothing of earlier requests."""
    _loaded.reset()
    return _loaded


@pytest.fixture(scope="session")
def tiny_folder(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama so small that a request takes milliseconds, with the default target's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=2,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_folder / name, folder)
    return folder


@pytest.fixture(scope="session")
def _tiny(tiny_folder: Path) -> LongSpec:
    return LongSpec.from_pretrained(str(tiny_folder), dtype="float32", device="cpu", calibrate=False)


@pytest.fixture
def tiny(_tiny: LongSpec) -> LongSpec:
    """That one, loaded, holding nothing of earlier requests; greedy and on the CPU."""
    _tiny.reset()
    return _tiny


@pytest.fixture(scope="session")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a small vocabulary of its own, because most of its time goes into that."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = sorted(Path(sysconfig.get_path("stdlib"), "json").glob("*.py"))
    tokenizer.train_from_iterator([path.read_text() for path in texts], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    config = LlamaConfig(vocab_size=len(fast), eos_token_id=0, initializer_range=0.5, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
