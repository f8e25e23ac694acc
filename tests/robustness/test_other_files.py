"""Files that are not JSON records of ours, changed at random: tokenizers, YAML, arrays, lines of prompts and
text. As in `test_files`: each is read or refused in one line, and costs little."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import save
from transformers import AutoTokenizer

from longspec.bench.workloads import read_file
from longspec.config import DraftConfig
from longspec.data.collate import collate
from longspec.data.encode import Encoder, encode_chunk
from longspec.data.inputs import find_files
from longspec.data.options import Recipe
from longspec.data.prepare import PrepareState, _read_state
from longspec.data.read import Position, read_chunks
from longspec.data.records import JsonLines, read_document, read_prompt
from longspec.data.shards import Packed, Role, finish, write_shard
from longspec.data.survey import spans, survey
from longspec.data.synthesis import SynthesisState, _note, _recall
from longspec.errors import UserError
from longspec.models.draft import GlideDraft
from longspec.models.draft_files import Fingerprint, draft_tensors, load_draft, read_draft_record, save_draft
from longspec.prompts import PromptEncoder
from longspec.text import pieces_of
from longspec.train.build import _check, _draws
from longspec.train.checkpoints import finish as finish_checkpoint
from longspec.train.command import _complete, compose_config
from longspec.train.engine import zero_stage
from longspec.train.export import model_card
from longspec.train.samples import Mixture
from tests.decoding.scripted import tiny_target
from tests.robustness.test_files import Reader, change, damage, fuzz

BYTES = list(pre_tokenizers.ByteLevel.alphabet())


def small_tokenizer(folder: Path) -> None:
    """Bytes and two words: it is read in milliseconds."""
    vocabulary = {token: index for index, token in enumerate([*sorted(BYTES), "hi", "Ġhi", "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "i"), ("Ġ", "hi")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "TokenizersBackend",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "model_max_length": 512,
        "added_tokens_decoder": {"258": {"content": "<|end|>", "special": True}},
        "chat_template": "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(a+)+$"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
    ],
)
def test_a_tokenizer_that_can_be_read_and_cannot_read(tmp_path: Path, change: dict[str, Any]) -> None:
    """An unknown word that has no token; a pattern that takes for ever, which is a panic of Rust's."""
    small_tokenizer(tmp_path)
    path, text = tmp_path / "tokenizer.json", "a" * 40 + "b"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    encoder = PromptEncoder(tmp_path)
    with pytest.raises(UserError, match="the target's tokenizer cannot read this text"):
        encoder.encode(text, False, 300)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (chunk,) = read_chunks(find_files([str(tmp_path / "text.jsonl")]), Position())
    with pytest.raises(UserError, match="the target's tokenizer cannot read a text"):
        encode_chunk(Encoder(Recipe(), encoder.tokenizer), chunk)


def damage_any(path: Path) -> Callable[[bytes, random.Random], bytes]:
    """How files of this kind are changed."""

    def binary(good: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return good[: rng.randrange(len(good))]
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 4, 32))):
            # Mostly where a header would be.
            place = rng.randrange(min(len(data), 256) if rng.random() < 0.6 else len(data))
            data[place] = rng.choice((0, 0xFF, data[place] ^ (1 << rng.randrange(8)), rng.randrange(256)))
        return bytes(data)

    def settings(good: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return binary(good, rng)
        bomb = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
            b"%c: &%c [%s]\n" % (one, one, b",".join([b"*%c" % (one - 1)] * 9)) for one in b"bcdefghi"
        )
        if rng.random() < 0.03:
            return rng.choice((bomb, b"&a [*a]", b"[" * 10**5, b"x: 2020-01-01\n", b"- " * 10**4, b"\xff"))
        documents = list(yaml.safe_load_all(good))
        documents[rng.randrange(len(documents))] = change(documents[rng.randrange(len(documents))], rng)
        return b"# @package _global_\n" + yaml.safe_dump_all(documents).encode("utf-8", "replace")

    return {".json": damage, ".jsonl": damage, ".yaml": settings}.get(path.suffix, binary)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Reader]:
    """Each file, good, with what reads it."""
    root = tmp_path_factory.mktemp("others")
    return text_files(root) | array_files(root) | settings_files(root)


def text_files(root: Path) -> dict[Path, Reader]:
    """What becomes tokens."""
    model = root / "model"
    model.mkdir()
    small_tokenizer(model)

    def encode() -> None:
        encoder = PromptEncoder(model)
        ids = encoder.encode("hi there, é", False, 300)
        pieces_of(encoder.tokenizer, ids)

    good = PromptEncoder(model).tokenizer
    AutoTokenizer.from_pretrained(model)  # its first call imports for seconds
    lines: dict[str, tuple[list[Any], Reader]] = {
        "prompts.jsonl": (
            [{"prompt": "a"}, {"turns": ["a", "b"]}, {"messages": [{"role": "user", "content": "x"}]}],
            lambda: JsonLines(root / "prompts.jsonl", read_prompt)[0],
        ),
        "documents.jsonl": (
            [{"text": "a"}, {"text": "b"}],
            lambda: JsonLines(root / "documents.jsonl", read_document),
        ),
        "workload.jsonl": (
            [{"prompt": "a", "raw": True}, {"question_id": 81, "category": "x", "turns": ["a", "b"]}],
            lambda: read_file(root / "workload.jsonl"),
        ),
    }
    records: dict[str, Any] = {
        "text": {"text": "a"},
        "source_target": {"source": "a", "target": "b"},
        "messages": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "cot": {"question": "a", "reasoning": "b", "answer": "c"},
        "ids": {"ids": [1, 2, 3], "prompt_ids": [1]},
    }
    for template, record in records.items():
        name = f"{template}.jsonl"

        def prepare(name: str = name, template: str = template) -> None:
            encoder = Encoder(Recipe(template=template, source_field="meta.name"), good)
            for chunk in read_chunks(find_files([str(root / name)]), Position()):
                encode_chunk(encoder, chunk)

        lines[name] = ([record | {"meta": {"name": "x"}}, record], prepare)
    for name, (some, _) in lines.items():
        (root / name).write_text("".join(json.dumps(one) + "\n" for one in some))
    return {
        model / "tokenizer.json": encode,
        model / "tokenizer_config.json": encode,
        **{root / name: read for name, (_, read) in lines.items()},
    }


def array_files(root: Path) -> dict[Path, Reader]:
    """Datasets, what synthesis and `prepare` noted, and a draft's weights."""
    dataset, synthesis, prepared = (root / name for name in ("dataset", "synthesis", "prepared"))
    rng = np.random.default_rng(0)
    rows = [
        Packed(rng.integers(3, 100, 16), np.full(16, Role.TEXT, np.uint8), np.array([0, n + 1], np.int32))
        for n in range(4)
    ]
    for folder in (dataset, synthesis):
        write_shard(folder, 0, rows, 100, [])
    finish(dataset, 1, 100, None, {"command": "made"})

    def read_dataset() -> None:
        mixture = Mixture([str(dataset)], 32)
        collate([mixture[index] for index in range(len(mixture))], "long", True)
        mixture.frequent(10, [2], 100)
        for index in range(4):
            list(spans(mixture.datasets[0][index]))
        survey(mixture.datasets[0])

    (synthesis / "progress").mkdir()
    _note(synthesis, SynthesisState(next_sample=3, num_tokens=9), [np.arange(9, dtype=np.uint64)])
    prepared.mkdir()
    (prepared / "prepare.json").write_text(json.dumps(asdict(PrepareState({"a": 1}))))
    target, draft = tiny_target(), root / "draft"
    made = GlideDraft(target.config, DraftConfig(window=9, max_lag=3))
    made.initialise()
    save_draft(made, draft, Fingerprint.of(target), "tiny")
    save(draft_tensors(made), root / "draft.pth")
    return {
        **{
            dataset / "shard-00000" / f"{name}.npy": read_dataset
            for name in ("tokens", "roles", "starts", "firsts")
        },
        dataset / "counts.npy": read_dataset,
        synthesis / "progress" / "shard-00000.npz": lambda: _recall(synthesis, SynthesisState()),
        prepared / "prepare.json": lambda: _read_state(prepared, {"a": 1}),
        draft / "model.safetensors": lambda: load_draft(draft, target, "tiny"),
        root / "draft.pth": lambda: load_draft(root / "draft.pth", target, "tiny"),
    }


def settings_files(root: Path) -> dict[Path, Reader]:
    """A user's experiment, and what a run wrote down."""
    from longspec.train.export import TRAINING, _stages

    groups, run, exported = root / "conf", root / "run", root / "exported"
    (groups / "experiment").mkdir(parents=True)
    experiment = {
        "draft": {"window": 16, "max_lag": 3, "cross_layers": [0]},
        "stage": {"seq_length": 16, "num_steps": 2, "lr": 0.1},
        "data": {"train": [str(root / "dataset")], "num_held_out": 1},
        "saving": {"keep": 1},
        "deepspeed": {"config": {"zero_optimization": {"stage": 1}}},
        "stages": {"base": ["stage=base", "stage.lr=0.1"]},
    }
    (groups / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{yaml.safe_dump(experiment)}")
    overrides = ["experiment=mine", "target.path=x", f"run={run}"]
    config = OmegaConf.to_yaml(compose_config(overrides, str(groups)), resolve=True)

    def compose() -> None:
        settings: Any = OmegaConf.to_object(_complete(compose_config(overrides, str(groups))))
        zero_stage(settings.deepspeed.config)
        shape = asdict(settings.draft)
        del shape["path"]
        _draws(settings.stage, DraftConfig(**shape), 256)
        _check(settings, Mixture(settings.data.train, settings.stage.seq_length))

    for folder in (run, exported):
        folder.mkdir()
    (run / "config.yaml").write_text(config.replace("path: null", f"path: {exported}", 1))
    checkpoint = run / "checkpoints" / ".building-00000001"
    checkpoint.mkdir(parents=True)
    shutil.copytree(root / "draft", checkpoint / "draft")
    state = {"num_steps": 2, "tokens": 3, "world_size": 1, "acceptance": None}
    finish_checkpoint(run, 1, state, 1)
    record = read_draft_record(run / "checkpoints" / "step-00000001" / "draft")
    assert record is not None
    figures = [{"step": 0, "eval_tau": 1.5}, {"step": 1, "loss": 3.5, "target_loss": 1.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in figures))

    def tell() -> None:
        model_card(_stages(run), record)

    tell()
    first = [asdict(stage) for stage in _stages(run)]
    (exported / TRAINING).write_text(yaml.safe_dump_all(first))
    tell()
    return {
        groups / "experiment" / "mine.yaml": compose,
        run / "config.yaml": tell,
        exported / TRAINING: tell,
        run / "metrics.jsonl": tell,
    }


def test_a_few_changes(files: dict[Path, Reader]) -> None:
    fuzz(files, 300, seed=1, damage_of=damage_any)


@pytest.mark.full
def test_ten_thousand_changes(files: dict[Path, Reader]) -> None:
    fuzz(files, 10_000, seed=2, damage_of=damage_any)
